"""Joins Python files into one: imports gathered and sorted, the service's own left out, bodies one after the other."""

from __future__ import annotations

import ast
import sys


def joined(texts: list[str], comment: str = "") -> str:
    """The last text's docstring, the imports of all sorted, then the bodies. `comment` heads the body."""
    imports: dict[str, set[str]] = {}
    bodies = [f"# ---- {comment} ----"] if comment else []
    doc = ""
    for text in texts:
        tree = ast.parse(text)
        nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in nodes:
            assert not any(alias.asname for alias in node.names), "an alias would be lost"
            if isinstance(node, ast.Import):
                imports |= {alias.name: set() for alias in node.names}
            elif node.module and not node.module.startswith(("service.", "__future__")):
                imports.setdefault(f"from {node.module}", set()).update(alias.name for alias in node.names)
        lines = text.splitlines()
        end = nodes[-1].end_lineno if nodes else 0
        bodies.append("\n".join(lines[end:]).strip("\n"))
        doc = "\n".join(lines[: tree.body[0].end_lineno])
    blocks = [_imports({name: names for name, names in imports.items() if _own(name) is own}) for own in (True, False)]
    body = "\n\n\n".join(one for one in bodies if one)
    return "\n\n".join(one for one in [doc, "from __future__ import annotations", *blocks, body] if one) + "\n"


def only(text: str, names: set[str]) -> str:
    """The text with those top-level names, all that they use, and the imports that these need."""
    tree = ast.parse(text)
    defined = {name: node for node in tree.body for name in _names(node)}
    wanted: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        wanted.add(name)
        used = {one.id for one in ast.walk(defined[name]) if isinstance(one, ast.Name)}
        waiting |= (used & set(defined)) - wanted
    lines = text.splitlines()
    kept = []
    for node in tree.body:
        if (
            isinstance(node, ast.Expr)
            or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
            or _names(node) & wanted
        ):
            kept.append(node)
    return "\n\n\n".join("\n".join(lines[_start(node) : node.end_lineno]) for node in kept) + "\n"


def _start(node: ast.stmt) -> int:
    """The line, from 0, at which a statement begins, decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)]) - 1


def _names(node: ast.stmt) -> set[str]:
    """The names that a top-level statement binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {one.id for one in targets if isinstance(one, ast.Name)}
    return set()


def _own(name: str) -> bool:
    """Whether Python brings the module."""
    return name.removeprefix("from ").split(".")[0] in sys.stdlib_module_names


def _imports(imports: dict[str, set[str]]) -> str:
    """Import lines in isort's order."""
    plain = sorted(f"import {name}" for name in imports if not name.startswith("from "))
    named = sorted(name for name in imports if name.startswith("from "))
    # Constants, then classes, then the rest: isort's order within a line.
    return "\n".join(
        plain
        + [
            f"{name} import {', '.join(sorted(imports[name], key=lambda one: (one[0].islower(), one)))}"
            for name in named
        ]
    )
