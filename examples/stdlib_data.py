"""Write the example data sets from the standard library of the running Python, with no download.

    python examples/stdlib_data.py --out DIR

It only reads files that ship with every Python from 3.11 on and writes three of its own:

functions.jsonl   {"prompt", "completion"}: a function's signature and docstring, and the rest of its source;
                  the two joined are the function as written, moved to column 0.
packages.jsonl    {"text", "label", "package", "split"}: a docstring, and the package it was written for.
topics.txt        the language reference behind help("for"), one paragraph per blank-line-separated block.

The same Python gives the same bytes: walks are sorted, draws are seeded, and no set decides an order.
Another Python gives other rows, since its library differs, but the same number of them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import random
import re
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 0
FUNCTION_ROWS = 5000
# The longest functions are tables and generated parsers: past this they fit no context used in the examples.
MAX_FUNCTION_CHARS = 8000
# Shorter bodies, `return self._x` and the like, are a quarter of all functions and leave nothing to learn.
MIN_COMPLETION_CHARS = 60
MIN_WORDS = 5

# The large packages that 3.11, 3.12 and 3.13 share. Not tkinter, which Debian and others package apart.
PACKAGES = (
    "_pydecimal",
    "asyncio",
    "email",
    "importlib",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)
TRAIN_PER_PACKAGE = 200
VALIDATION_PER_PACKAGE = 40

# Tests, other people's code, and what distributions leave out or later Pythons dropped.
SKIPPED = frozenset(
    {
        "__phello__",
        "__pycache__",
        "_bundled",
        "dist-packages",
        "distutils",
        "ensurepip",
        "idle_test",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "site-packages",
        "sitecustomize.py",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    }
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Row = dict[str, Any]


@dataclass
class Module:
    """One parsed source file, with its dotted name."""

    name: str
    lines: list[str]
    tree: ast.Module

    @property
    def top(self) -> str:
        """Return the package, or for a file of its own the module, that a user would import."""
        return self.name.partition(".")[0]


def modules(only: tuple[str, ...] = ()) -> Iterator[Module]:
    """Yield the modules by path, all or those of some packages; FileNotFoundError if there is no source.

    One at a time: hundreds of syntax trees held at once keep the garbage collector busier than the parser.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    if not paths:
        raise FileNotFoundError(f"no .py files under {root}: this Python has no readable standard library")
    for path in paths:
        parts = path.split("/")
        if SKIPPED.intersection(parts) or parts[0].startswith("config-"):
            continue
        if only and parts[0].removesuffix(".py") not in only:
            continue
        with tokenize.open(str(root / path)) as handle:
            source = handle.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old invalid escapes, of no interest here
            tree = ast.parse(source)
        # Not str.splitlines: the form feeds in old modules would shift every line number after them.
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield Module(name, source.split("\n"), tree)


def functions(node: ast.AST) -> Iterator[Function]:
    """Yield the functions and methods under `node` in file order, without those inside other functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child
        elif not isinstance(child, ast.expr):  # nothing to find there, and most nodes are there
            yield from functions(child)


def first_line(node: ast.stmt) -> int:
    """Return the 1-based line a statement starts on, its decorators included."""
    decorators = node.decorator_list if isinstance(node, Function | ast.ClassDef) else []
    return min([node.lineno, *(item.lineno for item in decorators)])


def function_row(module: Module, node: Function) -> tuple[bool, Row] | None:
    """Return (has a docstring, row), or None where signature and body share a line or little is left."""
    documented = ast.get_docstring(node, clean=False) is not None
    start = first_line(node) - 1
    split = (node.body[0].end_lineno or 0) if documented else first_line(node.body[0]) - 1
    if documented and len(node.body) > 1 and first_line(node.body[1]) <= split:
        return None
    if split < node.lineno:
        return None
    prompt = dedent(module.lines[start:split], node.col_offset)
    completion = dedent(module.lines[split : node.end_lineno], node.col_offset)
    if len(completion.strip()) < MIN_COMPLETION_CHARS or len(prompt) + len(completion) > MAX_FUNCTION_CHARS:
        return None
    if not documented:  # a bare name says little, so say where it is from
        prompt = f"# from {module.name}\n{prompt}"
    return documented, {"prompt": prompt, "completion": completion}


def dedent(lines: Iterable[str], columns: int) -> str:
    """Join lines less up to `columns` of indent; textwrap.dedent gives up where a string is flush left."""
    return "".join(re.sub(rf"^[ \t]{{0,{columns}}}", "", line.rstrip()) + "\n" for line in lines)


def function_rows(library: Iterable[Module]) -> list[Row]:
    """Choose FUNCTION_ROWS rows, shuffled; ValueError if the library has fewer functions.

    Every documented function is taken before any other.
    """
    seen: set[str] = set()
    pools: dict[bool, list[Row]] = {True: [], False: []}
    for module in library:
        for node in functions(module.tree):
            found = function_row(module, node)
            if found is None:
                continue
            documented, row = found
            key = row["prompt"].removeprefix(f"# from {module.name}\n") + row["completion"]
            if key not in seen:
                seen.add(key)
                pools[documented].append(row)
    if len(seen) < FUNCTION_ROWS:
        raise ValueError(f"the standard library has {len(seen)} functions of the {FUNCTION_ROWS} needed")
    rng = random.Random(f"{SEED}:functions")
    rows = rng.sample(pools[True], min(FUNCTION_ROWS, len(pools[True])))
    # The longest of the rest, not any: documented functions alone lack the long tail of real training sets.
    rest = sorted(pools[False], key=lambda row: len(row["completion"]), reverse=True)
    rows += rest[: FUNCTION_ROWS - len(rows)]
    rng.shuffle(rows)
    return rows


def docstrings(module: Module) -> Iterator[str]:
    """Yield the docstrings of a module and of every class and function in it."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            yield ast.get_docstring(node) or ""


def comments(module: Module) -> Iterator[str]:
    """Yield each run of comment-only lines as one text."""
    block: list[str] = []
    for line in [*module.lines, ""]:
        stripped = line.strip()
        if stripped.startswith("#"):
            block.append(stripped.lstrip("#!: ").rstrip())
        elif block:
            yield "\n".join(block).strip()
            block = []


def package_rows(library: Iterable[Module]) -> list[Row]:
    """Draw equal classes of docstrings; ValueError if a package has too few.

    The smaller packages fall short of their share in docstrings, so comment blocks fill it up: without them
    equal classes would leave some 1,000 rows to train on.
    """
    docs: dict[str, dict[str, str]] = {package: {} for package in PACKAGES}
    notes: dict[str, dict[str, str]] = {package: {} for package in PACKAGES}
    for module in library:
        if module.top in docs:
            for pool, found in ((docs, docstrings(module)), (notes, comments(module))):
                for text in found:
                    words = text.split()
                    if len(words) >= MIN_WORDS:
                        pool[module.top].setdefault(" ".join(words), text)
    # A text that two packages share has no right answer.
    owners = Counter(key for package in PACKAGES for key in {**docs[package], **notes[package]})
    size = TRAIN_PER_PACKAGE + VALIDATION_PER_PACKAGE
    splits: dict[str, list[Row]] = {"train": [], "validation": []}
    rng = random.Random(f"{SEED}:packages")
    for label, package in enumerate(PACKAGES):
        first = [text for key, text in docs[package].items() if owners[key] == 1]
        spare = [t for key, t in notes[package].items() if owners[key] == 1 and key not in docs[package]]
        if len(first) + len(spare) < size:
            raise ValueError(f"package {package} has {len(first) + len(spare)} texts of the {size} needed")
        texts = rng.sample(first, min(size, len(first)))
        texts += rng.sample(spare, size - len(texts))
        rng.shuffle(texts)
        for index, text in enumerate(texts):
            split = "train" if index < TRAIN_PER_PACKAGE else "validation"
            splits[split].append({"text": text, "label": label, "package": package, "split": split})
    for rows in splits.values():
        rng.shuffle(rows)
    return splits["train"] + splits["validation"]


def topic_blocks() -> list[str]:
    """Return the language reference's paragraphs, each once; ImportError if pydoc_data is not installed."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    blocks: dict[str, None] = {}  # a dict, not a set: topics quote each other, and the order must hold
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            if block.strip():
                blocks.setdefault("\n".join(line.rstrip() for line in block.strip("\n").split("\n")))
    return list(blocks)


def write(out: Path) -> dict[str, Path]:
    """Write the three files into `out` and return them by stem; ValueError if the library is too small."""
    out.mkdir(parents=True, exist_ok=True)
    contents = {
        "functions.jsonl": json_lines(function_rows(modules())),
        "packages.jsonl": json_lines(package_rows(modules(PACKAGES))),
        "topics.txt": "\n\n".join(topic_blocks()) + "\n",
    }
    for name, text in contents.items():
        # Bytes, since Windows would turn the newlines of a text file into others.
        (out / name).write_bytes(text.encode("utf-8"))
    return {Path(name).stem: out / name for name in contents}


def json_lines(rows: Iterable[Row]) -> str:
    """Return rows as JSON lines; TypeError if a value is not plain JSON."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def summary(name: str, texts: list[str]) -> str:
    """Return one line of counts and lengths in characters; IndexError if there are no texts."""
    lengths = sorted(map(len, texts))
    marks = ", ".join(f"p{q} {lengths[(len(lengths) - 1) * q // 100]:,}" for q in (50, 90, 99, 100))
    return f"{name}: {len(texts):,} rows, {sum(lengths):,} characters ({marks})"


def main() -> None:
    """Parse --out, write the files and print what they hold; exits 2 on a bad argument."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to, made if missing")
    paths = write(parser.parse_args().out)
    rows = [json.loads(line) for line in paths["functions"].read_text("utf-8").split("\n") if line]
    print(summary("functions", [row["prompt"] + row["completion"] for row in rows]))
    rows = [json.loads(line) for line in paths["packages"].read_text("utf-8").split("\n") if line]
    for split in ("train", "validation"):
        print(summary(f"packages/{split}", [row["text"] for row in rows if row["split"] == split]))
    print(summary("topics", paths["topics"].read_text("utf-8").rstrip("\n").split("\n\n")))


if __name__ == "__main__":
    main()
