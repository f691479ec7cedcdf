"""Prints the training code for one recipe: what the recipe decides is decided here, and what is not used is left out.

A partial evaluation of Python source with libcst, which keeps comments and layout. In the text of training/:

- `recipe.field` becomes the field's value, or a constant of that name at the head of the script;
- tests that only depend on the recipe are decided, and the branches not taken are gone;
- `for choice in recipe.field` is written out, `apply(recipe.field, ...)` calls the function that the field names;
- `task_of(recipe).function` is the function of the recipe's task, and the parameter `recipe` disappears;
- functions, constants and imports that nothing uses any more are dropped.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from service.recipe import Applied

UNKNOWN = object()
NAME = m.Name(m.MatchIfTrue(lambda value: value not in ("None", "True", "False")))  # to libcst these are names too
END = (cst.Return, cst.Raise, cst.Continue, cst.Break)


def code_of(value: Any) -> cst.BaseExpression:
    """A value's Python literal."""
    return cst.parse_expression(repr(value))


class Specialiser(cst.CSTTransformer):
    """Rewrites one module for `known` names; `constants` collects the recipe's fields that the text still mentions."""

    def __init__(self, known: Mapping[str, Any], constants: dict[str, Any]) -> None:
        super().__init__()
        self._known, self.constants = known, constants

    def value(self, node: cst.CSTNode) -> Any:
        """What an expression is worth if it depends on known names and literals alone, else UNKNOWN."""
        tree = ast.parse(f"({cst.Module([]).code_for_node(node)})", mode="eval").body
        names = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
        plain = (ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Subscript, ast.Tuple)
        rest = (ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop, ast.operator, ast.Dict)
        if not names <= self._known.keys() or not all(isinstance(one, plain + rest) for one in ast.walk(tree)):
            return UNKNOWN
        return eval(compile(ast.Expression(tree), "recipe", "eval"), {"__builtins__": {}}, dict(self._known))

    def folded(self, original: cst.BaseExpression, updated: cst.BaseExpression) -> cst.BaseExpression:
        """The expression's value in place of it, where that is known and can be written down."""
        value = self.value(original)
        return code_of(value) if value is not UNKNOWN and not isinstance(value, Applied) else updated

    def truth(self, original: cst.BaseExpression, updated: cst.BaseExpression) -> Any:
        """Whether a test is decided, and how; UNKNOWN where only the run can tell."""
        value = self.value(original)
        return self.value(updated) if value is UNKNOWN else value

    # --- expressions

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        """`recipe.field`: a constant at the head of the script, but for what is None, true or false."""
        if _is_task_of(original_node.value):
            return cst.Name(original_node.attr.value)
        of_recipe = isinstance(original_node.value, cst.Name) and original_node.value.value in self._known
        value = self.value(original_node) if of_recipe else UNKNOWN
        if value is UNKNOWN or isinstance(value, Applied):
            return updated_node
        if value is None or isinstance(value, bool):
            return code_of(value)
        name = original_node.attr.value.upper()
        self.constants[name] = value
        return cst.Name(name)

    def leave_Comparison(self, original_node: cst.Comparison, updated_node: cst.Comparison) -> cst.BaseExpression:
        """A decided comparison is its value."""
        return self.folded(original_node, updated_node)

    def leave_UnaryOperation(
        self, original_node: cst.UnaryOperation, updated_node: cst.UnaryOperation
    ) -> cst.BaseExpression:
        """`not` of what is decided is decided; a negative number stays as it is."""
        if not isinstance(original_node.operator, cst.Not):
            return updated_node
        value = self.truth(original_node, updated_node)
        return updated_node if value is UNKNOWN else code_of(value)

    def leave_BooleanOperation(
        self, original_node: cst.BooleanOperation, updated_node: cst.BooleanOperation
    ) -> cst.BaseExpression:
        """`and` and `or` of which one side is decided."""
        ends = isinstance(original_node.operator, cst.Or)
        left = self.truth(original_node.left, updated_node.left)
        if left is not UNKNOWN:
            return self.folded(original_node.left, updated_node.left) if bool(left) is ends else updated_node.right
        right = self.truth(original_node.right, updated_node.right)
        if right is not UNKNOWN and bool(right) is not ends and m.findall(original_node.right, NAME):
            return updated_node.left  # unlike the right side of `text or ""`, which is a value and no test
        return updated_node

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.BaseExpression:
        """A decided conditional expression is the side that is taken."""
        test = self.truth(original_node.test, updated_node.test)
        if test is UNKNOWN:
            return updated_node
        return updated_node.body if test else updated_node.orelse

    def leave_Subscript(self, original_node: cst.Subscript, updated_node: cst.Subscript) -> cst.BaseExpression:
        """An entry of a field that is a mapping."""
        return self.folded(original_node, updated_node)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """`apply`, `getattr` with a known name, and calls that pass the recipe on."""
        name = original_node.func.value if isinstance(original_node.func, cst.Name) else ""
        if name == "apply":
            choice = self.value(original_node.args[0].value)
            if not isinstance(choice, Applied):
                return updated_node  # in a function that this recipe has no use for, so that it is not printed
            options = [_keyword(option, value) for option, value in choice.options.items()]
            return updated_node.with_changes(
                func=cst.Name(choice.function), args=_last_without_comma([*updated_node.args[1:], *options])
            )
        if name == "getattr" and len(original_node.args) == 2:
            attribute = self.value(original_node.args[1].value)
            if isinstance(attribute, str):
                return cst.Attribute(updated_node.args[0].value, cst.Name(attribute))
        arguments: list[cst.Arg] = []
        for original, argument in zip(original_node.args, updated_node.args, strict=True):
            value = self.value(original.value) if argument.star == "**" else UNKNOWN
            folded_to_none = m.matches(argument.value, m.Name("None")) and not m.matches(original.value, m.Name("None"))
            if m.matches(argument.value, m.Name("recipe")) or (argument.keyword and folded_to_none):
                continue  # leaving an argument out is the same as None
            if isinstance(value, Mapping):
                arguments += [_keyword(option, one) for option, one in value.items()]
            else:
                arguments.append(argument)
        return updated_node.with_changes(args=_last_without_comma(arguments))

    # --- statements

    def visit_If(self, node: cst.If) -> bool:
        """A branch that is not taken is not even looked at: see leave_If."""
        return False

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        """The branch that is taken, in place of a decided `if`."""
        del updated_node
        statements = self._decided(original_node)
        return cst.FlattenSentinel(statements) if statements else cst.RemoveFromParent()

    def _decided(self, node: cst.If) -> list[Any]:
        """What an `if` comes to: the statements of one branch, or the `if` itself where only the run can tell."""
        tested = node.test.visit(self)
        assert isinstance(tested, cst.BaseExpression)
        test = self.truth(node.test, tested)
        orelse = node.orelse
        if test is UNKNOWN:
            if isinstance(orelse, cst.If):
                rest = self._decided(orelse)
                still = len(rest) == 1 and isinstance(rest[0], cst.If)
                orelse = rest[0] if still else cst.Else(cst.IndentedBlock(rest)) if rest else None
            elif orelse is not None:
                orelse = orelse.visit(self)  # type: ignore[assignment]
            return [node.with_changes(test=tested, body=node.body.visit(self), orelse=orelse)]
        if isinstance(orelse, cst.If) and not test:
            return self._decided(orelse)
        branch = node.body if test else orelse.body if isinstance(orelse, cst.Else) else None
        return _under(node.leading_lines, list(branch.visit(self).body)) if branch else []  # type: ignore[union-attr]

    def visit_For(self, node: cst.For) -> bool:
        """A loop over a field of the recipe is written out later, with its variable known."""
        return self._fields(node.iter) is UNKNOWN

    def _fields(self, node: cst.BaseExpression) -> Any:
        """The values of a field that a loop goes over, UNKNOWN where it goes over something else."""
        return self.value(node) if m.findall(node, NAME) else UNKNOWN

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> Any:
        """The body once for each of the field's values."""
        values = self._fields(original_node.iter)
        if values is UNKNOWN:
            return updated_node
        assert isinstance(original_node.target, cst.Name), "a loop over a field has one variable"
        written: list[cst.BaseStatement] = []
        for value in values:
            inner = Specialiser({**self._known, original_node.target.value: value}, self.constants)
            written += original_node.body.visit(inner).body  # type: ignore[union-attr, arg-type]
        return cst.FlattenSentinel(written) if written else cst.RemoveFromParent()

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> Any:
        """What follows a `return` is never reached."""
        body = list(updated_node.body)
        for at, statement in enumerate(body):
            if isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[-1], END):
                return updated_node.with_changes(body=body[: at + 1])
        return updated_node

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        """The parameter `recipe` is no more."""
        parameters = updated_node.params
        kept, named = (_without_recipe(given) for given in (parameters.params, parameters.kwonly_params))
        bare = isinstance(parameters.star_arg, cst.ParamStar) and not named  # the star that only parts keywords off
        star = cst.MaybeSentinel.DEFAULT if bare else parameters.star_arg
        return updated_node.with_changes(
            params=parameters.with_changes(params=kept, kwonly_params=named, star_arg=star)
        )


def _without_recipe(parameters: Sequence[cst.Param]) -> list[cst.Param]:
    """The parameters but for `recipe`, with no comma after the last."""
    kept = [one for one in parameters if one.name.value != "recipe"]
    return kept[:-1] + [kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)] if kept else []


def _is_task_of(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "task_of"


def _keyword(name: str, value: Any) -> cst.Arg:
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(keyword=cst.Name(name), value=code_of(value), equal=equal)


def _last_without_comma(arguments: list[cst.Arg]) -> list[cst.Arg]:
    space = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return [
        one.with_changes(
            comma=space if at < len(arguments) - 1 else cst.MaybeSentinel.DEFAULT,
            whitespace_after_arg=cst.SimpleWhitespace(""),
        )
        for at, one in enumerate(arguments)
    ]


def _under(lines: Any, statements: list[Any]) -> list[Any]:
    """The statements of a branch, under the comments that stood above its `if`."""
    comments = [line for line in lines if line.comment is not None]
    if comments and statements:
        first = statements[0]
        statements[0] = first.with_changes(leading_lines=[*comments, *first.leading_lines])
    return statements
