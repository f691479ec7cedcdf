"""Writes small functions of a printed script where they are called, so that it reads from top to bottom.

What specialising leaves over is often a function of one expression, or one that is called in a single place. Both are
written where they are called, if that is safe: no name may mean two things, and nothing is computed twice.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import libcst as cst
import libcst.matchers as m

# What may be written several times, or before what the function does: computing it later, or again, changes nothing.
SIMPLE = m.Name() | m.SimpleString() | m.Integer() | m.Float() | m.Attribute(value=m.Name())
# Expressions that need no parentheses wherever they are put.
WHOLE = m.OneOf(
    *(m.Call(), m.Name(), m.Attribute(), m.Subscript(), m.List(), m.Dict(), m.ListComp(), m.SimpleString(), m.Integer())
)
SHORT = 72  # characters of an expression that may stand in several places


@dataclass(frozen=True, eq=False)
class Candidate:
    """A function that may be inlined: its parameters with their defaults, its statements, and what it returns."""

    name: str
    parameters: tuple[str, ...]
    defaults: Mapping[str, cst.BaseExpression]
    rest: str | None  # the name of its ** parameter
    body: tuple[cst.BaseStatement, ...]
    value: cst.BaseExpression | None


def inlined(statements: list[str]) -> list[str]:
    """The top-level statements of a script with all small functions inlined, one after the other."""
    refused: set[str] = {"main"}
    while (candidate := _next(statements, refused)) is not None:
        refused.add(candidate.name)
        uses = _uses(statements, candidate.name)
        changed = [_written(one, candidate) if _names(one)[candidate.name] else (one, 0) for one in statements]
        if sum(done for _, done in changed) == uses:
            statements = [one for one, _ in changed if not one.startswith(f"def {candidate.name}(")]
    return statements


@lru_cache(maxsize=1024)
def parsed(code: str) -> cst.Module:
    """The code's tree. Trees are never changed, so one serves every script that holds the same code."""
    return cst.parse_module(code)


@lru_cache(maxsize=4096)
def _written(statement: str, candidate: Candidate) -> tuple[str, int]:
    """(a statement's text with the candidate written where it is called, how many calls that replaced)."""
    inliner = _Inliner(candidate)
    return parsed(statement).visit(inliner).code, inliner.done


@lru_cache(maxsize=4096)
def _names(code: str) -> Counter[str]:
    """How often each variable or function is named in the code; attributes and keywords of calls do not count."""
    return Counter(node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name))


def _uses(statements: list[str], name: str) -> int:
    """How often the name is used."""
    return sum(_names(statement)[name] for statement in statements)


def _next(statements: list[str], refused: set[str]) -> Candidate | None:
    """The next function to try, those that are defined last first, so that what they call comes after them."""
    for statement in reversed(statements):
        name = statement.removeprefix("def ").partition("(")[0]
        if statement.startswith("def ") and name not in refused:
            candidate = _candidate(statement, _uses(statements, name) == 1)
            if candidate is not None:
                return candidate
            refused.add(name)
    return None


@lru_cache(maxsize=1024)
def _candidate(text: str, is_used_once: bool) -> Candidate | None:
    """The function as a candidate; None where it has to stay a function."""
    tree, node = ast.parse(text).body[0], parsed(text).body[0]
    assert isinstance(tree, ast.FunctionDef) and isinstance(node, cst.FunctionDef)
    statements = list(node.body.body)
    if ast.get_docstring(tree) is not None:
        statements = statements[1:]
    last = statements[-1] if statements else None
    value = None
    if isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], cst.Return):
        value, statements = last.body[-1].value, statements[:-1]
    inner = [one for part in tree.body for one in ast.walk(part)]
    returns = sum(isinstance(one, ast.Return) for one in inner)
    stays = any(isinstance(one, ast.Yield | ast.YieldFrom | ast.FunctionDef | ast.Delete) for one in inner)
    rest = node.params.star_kwarg.name.value if node.params.star_kwarg else None
    if rest is not None and any(isinstance(one, ast.Dict) and rest in _names(ast.unparse(one)) for one in inner):
        return None  # `**rest` is only known as keywords of a call
    if stays or returns != (value is not None) or node.params.kwonly_params:
        return None
    short = value is not None and not statements and len(_code(value)) <= SHORT
    if not is_used_once and not short and (statements or value is not None):
        return None
    return Candidate(
        node.name.value,
        tuple(one.name.value for one in node.params.params),
        {one.name.value: one.default for one in node.params.params if one.default is not None},
        rest,
        tuple(statements),  # type: ignore[arg-type]
        value,
    )


def _code(*nodes: cst.CSTNode) -> str:
    """The text of statements or of an expression."""
    return "\n".join(cst.Module([]).code_for_node(node) for node in nodes)


def _stored(code: str) -> set[str]:
    """The names that the code binds: targets, loop variables, imports, comprehensions' and lambdas' own."""
    found = set()
    for one in ast.walk(ast.parse(code)):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
        elif isinstance(one, ast.arg):
            found.add(one.arg)
        elif isinstance(one, ast.alias):
            found.add(one.asname or one.name)
    return found


class _Substitute(cst.CSTTransformer):
    """Puts arguments in the place of parameters."""

    def __init__(self, arguments: Mapping[str, cst.BaseExpression], rest: str | None, extra: list[cst.Arg]) -> None:
        super().__init__()
        self._arguments, self._rest, self._extra = arguments, rest, extra

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        """Only what stands before the dot is substituted."""
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> Any:
        """A keyword is no parameter; `**rest` becomes the call's own keywords."""
        if original_node.star == "**" and m.matches(original_node.value, m.Name(self._rest or "")):
            return cst.FlattenSentinel(self._extra)
        value = updated_node.value
        if m.matches(original_node.value, m.Name()) and value.lpar:
            value = value.with_changes(lpar=[], rpar=[])  # commas part arguments as well as parentheses would
        return updated_node.with_changes(keyword=original_node.keyword, value=value)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        """A parameter is its argument."""
        found = self._arguments.get(original_node.value)
        if found is None or m.matches(found, WHOLE):
            return found or updated_node
        return found if found.lpar else found.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


class _Inliner(cst.CSTTransformer):
    """Replaces the calls of one function. `done` counts them: all have to be replaced, or none is."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__()
        self._candidate, self.done = candidate, 0
        value = [] if candidate.value is None else [candidate.value]
        self._text = "\n".join([_code(*candidate.body), *(f"({_code(one)})" for one in value)])
        self._callers: list[cst.FunctionDef] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        """Remember whose names the call stands among."""
        self._callers.append(node)
        return node.name.value != self._candidate.name

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        """Out of the function again."""
        self._callers.pop()
        return updated_node

    def _passed_through(self, arguments: Mapping[str, cst.BaseExpression], target: str | None) -> set[str]:
        """The variable of `x = function(x)` where the function calls it x as well, and returns it under that name."""
        value = self._candidate.value
        if target is None or not m.matches(value, m.Name(target)) or target not in arguments:  # type: ignore[arg-type]
            return set()
        return {target} if m.matches(arguments[target], m.Name(target)) else set()

    def _substituted(self, call: cst.Call, target: str | None = None) -> _Substitute | None:
        """How to put the call's arguments in; None where a name would mean two things, or a value be computed twice."""
        candidate = self._candidate
        arguments: dict[str, cst.BaseExpression] = dict(candidate.defaults)
        extra = []
        for at, argument in enumerate(call.args):
            name = argument.keyword.value if argument.keyword else None
            if argument.star or (name is None and at >= len(candidate.parameters)):
                return None
            if name is None or name in candidate.parameters:
                arguments[name or candidate.parameters[at]] = argument.value
            else:
                extra.append(argument)
        if set(arguments) != set(candidate.parameters) or (extra and candidate.rest is None):
            return None
        own = _stored(self._text) - self._passed_through(arguments, target)
        given = [f"({_code(one)})" for one in (*arguments.values(), *(one.value for one in extra))]
        used_in_arguments = set(_names("\n".join(given)))
        if own & used_in_arguments or own & set(arguments):
            return None
        for name, value in arguments.items():
            times = _names(self._text)[name]
            simple = m.matches(value, SIMPLE)
            if not simple and (times > 1 or candidate.body):
                return None
        return _Substitute(arguments, candidate.rest, extra)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Replace a call of a function of one expression by the expression."""
        candidate = self._candidate
        if candidate.body or candidate.value is None or not m.matches(original_node.func, m.Name(candidate.name)):
            return updated_node
        substitute = self._substituted(updated_node)
        if substitute is None:
            return updated_node
        self.done += 1
        value = candidate.value.deep_clone().visit(substitute)
        assert isinstance(value, cst.BaseExpression)
        plain = m.matches(value, WHOLE)
        if plain or value.lpar:
            return value
        return value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """Replace a statement that only calls the function by the function's statements."""
        candidate = self._candidate
        only = original_node.body[0]
        if not candidate.body and candidate.value is not None:
            return updated_node
        if not isinstance(only, cst.Expr | cst.Assign | cst.Return) or len(self._callers) != 1:
            return updated_node
        call = only.value
        if not isinstance(call, cst.Call) or not m.matches(call.func, m.Name(candidate.name)):
            return updated_node
        target = only.targets[0].target if isinstance(only, cst.Assign) else None
        substitute = self._substituted(call, target.value if isinstance(target, cst.Name) else None)
        caller = self._callers[0]
        free = set(_names(_code(caller))) & _stored(_code(*candidate.body))
        if substitute is None or (free and not self._same_target(only, free)):
            return updated_node
        self.done += 1
        statements: list[Any] = [one.deep_clone().visit(substitute) for one in candidate.body]
        if candidate.value is not None:
            value = candidate.value.deep_clone().visit(substitute)
            statements += _ending(only, value)
        if not statements:
            return cst.RemoveFromParent()
        first = statements[0].with_changes(leading_lines=original_node.leading_lines)
        return cst.FlattenSentinel([first, *statements[1:]])

    def _same_target(self, statement: cst.BaseSmallStatement, clashing: set[str]) -> bool:
        """Whether one name alone clashes: the function's result, assigned to a variable of the same name."""
        value = self._candidate.value
        return (
            isinstance(statement, cst.Assign)
            and isinstance(value, cst.Name)
            and clashing == {value.value}
            and m.matches(statement.targets[0].target, m.Name(value.value))
        )


def _ending(statement: cst.BaseSmallStatement, value: Any) -> list[cst.SimpleStatementLine]:
    """What is done with the value: returned, assigned, or nothing."""
    if isinstance(statement, cst.Return):
        return [cst.SimpleStatementLine([cst.Return(value)])]
    if isinstance(statement, cst.Assign):
        target = statement.targets[0].target
        if isinstance(target, cst.Name) and isinstance(value, cst.Name) and target.value == value.value:
            return []
        return [cst.SimpleStatementLine([statement.with_changes(value=value)])]
    return []
