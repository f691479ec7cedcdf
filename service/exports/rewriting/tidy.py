"""Takes out of a printed script what has no use there: parameters, keywords, values, and contexts that do nothing."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import libcst as cst
import libcst.matchers as m

from service.exports.rewriting.inline import parsed

NO_CONTEXT = m.WithItem(
    item=m.Call(func=m.Attribute(m.Name("contextlib"), m.Name("nullcontext")), args=[]), asname=None
)
PLAIN = (ast.Constant, ast.Name, ast.Dict, ast.List, ast.Tuple, ast.UnaryOp, ast.USub, ast.expr_context)


def tidied(statements: list[str]) -> list[str]:
    """A script's statements without unused parameters, values that nothing reads, and contexts that do nothing."""
    before: list[str] = []
    while before != statements:
        before, unused = statements, _unused_parameters(statements)
        read = frozenset[str]().union(*(_seen(one).read for one in statements))
        statements = [
            _tidied(one, tuple((name, unused[name]) for name in unused if name in _named(one)), _named(one) - read)
            for one in statements
            if _constants(one) <= read
        ]
    return statements


@lru_cache(maxsize=4096)
def _constants(statement: str) -> frozenset[str]:
    """The name of the constant that a statement defines, if it is such a statement."""
    match ast.parse(statement).body:
        case [ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name))]:
            return frozenset({name})
    return frozenset()


@lru_cache(maxsize=4096)
def _named(statement: str) -> frozenset[str]:
    """The names in a statement, and that of the function which it defines."""
    tree = ast.parse(statement)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return frozenset(functions | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})


@lru_cache(maxsize=4096)
def _tidied(statement: str, unused: tuple[tuple[str, tuple[_Parameter, ...]], ...], unread: frozenset[str]) -> str:
    """One statement's text, parsed only where there is something to take out."""
    passes: list[cst.CSTTransformer] = [_WithoutParameters(name, parameters) for name, parameters in unused]
    if "nullcontext" in statement:
        passes.append(_NoContexts())
    function = statement.removeprefix("def ").partition("(")[0]
    if statement.startswith("def ") and unread - {function}:
        passes.append(_NoDeadVariables(unread))
    for one in passes:
        statement = parsed(statement).visit(one).code
    return statement


class _NoContexts(cst.CSTTransformer):
    """Replaces `with contextlib.nullcontext():` by its body."""

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Any:
        """The statements of a block whose context does nothing."""
        if len(updated_node.items) == 1 and m.matches(updated_node.items[0], NO_CONTEXT):
            return cst.FlattenSentinel(updated_node.body.body)  # type: ignore[arg-type]
        return updated_node


@dataclass(frozen=True)
class _Parameter:
    """A parameter by its name and its place among the positional ones.

    One like `**_` has no place. It takes all keywords but those that are `known`, which have parameters of their own.
    """

    name: str
    place: int = -1
    known: frozenset[str] | None = None


@dataclass(frozen=True)
class _Seen:
    """What one statement mentions.

    `read` are the names whose values it uses; `passed_on` those that it uses other than by calling them without stars.
    `unused` are the parameters that the body of a function's definition does not mention.
    """

    read: frozenset[str]
    passed_on: frozenset[str]
    function: str
    unused: tuple[_Parameter, ...]


@lru_cache(maxsize=4096)
def _seen(statement: str) -> _Seen:
    tree = ast.parse(statement)
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    calls = {id(node.func) for node in nodes if isinstance(node, ast.Call) and not _has_star(node)}
    read = frozenset(node.id for node in names if isinstance(node.ctx, ast.Load))
    passed_on = frozenset(node.id for node in names if id(node) not in calls)
    first = tree.body[0] if tree.body else None
    if not isinstance(first, ast.FunctionDef) or first.args.defaults or first.name == "main":
        return _Seen(read, passed_on, "", ())
    named = {node.id for part in first.body for node in ast.walk(part) if isinstance(node, ast.Name)}
    unused = [_Parameter(one.arg, at) for at, one in enumerate(first.args.args) if one.arg not in named]
    if (rest := first.args.kwarg) and rest.arg not in named:
        known = frozenset(one.arg for one in (*first.args.args, *first.args.kwonlyargs))
        unused.append(_Parameter(rest.arg, known=known))
    return _Seen(read, passed_on, first.name, tuple(unused))


def _unused_parameters(statements: Sequence[str]) -> dict[str, tuple[_Parameter, ...]]:
    """Of each function that is only ever called by its name, the parameters that its body does not mention."""
    seen = [_seen(one) for one in statements]
    passed_on = frozenset[str]().union(*(one.passed_on for one in seen))
    return {one.function: one.unused for one in seen if one.unused and one.function not in passed_on}


def _has_star(call: ast.Call) -> bool:
    """Whether a call passes arguments that are not written out."""
    return any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)


class _WithoutParameters(cst.CSTTransformer):
    """Takes parameters out of a function and out of all calls of it."""

    def __init__(self, function: str, unused: Sequence[_Parameter]) -> None:
        super().__init__()
        self._function = function
        self._places, self._names = {one.place for one in unused}, {one.name for one in unused}
        self._known = next((one.known for one in unused if one.known is not None), None)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        """The function without them."""
        if original_node.name.value != self._function:
            return updated_node
        parameters = updated_node.params
        kept = [one for one in parameters.params if one.name.value not in self._names]
        named = _no_last_comma(list(parameters.kwonly_params))
        rest = parameters.star_kwarg if self._known is None else None
        parameters = parameters.with_changes(params=_no_last_comma(kept), kwonly_params=named, star_kwarg=rest)
        return updated_node.with_changes(params=parameters)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """The call without them."""
        if not m.matches(original_node.func, m.Name(self._function)):
            return updated_node
        kept = [
            one
            for at, one in enumerate(updated_node.args)
            if (self._takes(one.keyword.value) if one.keyword else at not in self._places)
        ]
        return updated_node.with_changes(args=_no_last_comma(kept))

    def _takes(self, keyword: str) -> bool:
        """Whether the function still takes this keyword."""
        return keyword not in self._names and (self._known is None or keyword in self._known)


def _no_last_comma(nodes: list[Any]) -> list[Any]:
    return [*nodes[:-1], nodes[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)] if nodes else []


class _NoDeadVariables(cst.CSTTransformer):
    """Drops assignments of plain values, within functions, to variables that nothing reads."""

    def __init__(self, unread: frozenset[str]) -> None:
        super().__init__()
        self._unread, self._depth = unread, 0

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """Within a function now."""
        self._depth += 1

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        """Out of the function again."""
        self._depth -= 1
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """A line that only assigns what nothing reads is gone."""
        statement = updated_node.body[0]
        if not self._depth or not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
            return updated_node
        target = statement.targets[0].target
        value = ast.parse(cst.Module([]).code_for_node(statement.value), mode="eval").body
        plain = all(isinstance(node, PLAIN) for node in ast.walk(value))
        if isinstance(target, cst.Name) and target.value in self._unread and plain:
            return cst.RemoveFromParent()
        return updated_node
