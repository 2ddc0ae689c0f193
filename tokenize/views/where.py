"""Expressions over documents: `language == 'en' and score >= 0.8`.

Python's grammar parses the text; nothing evaluates it. Comparisons, `and`, `or`, `not`, `in`,
`is None`, names and literals become a pyarrow.compute expression. A comparison with null is
neither true nor false, as in SQL: the document is not chosen, unless another clause chooses it.

pyarrow cannot look up a value in a field of lists. Such a clause is a column (`Member`), which the
caller computes before evaluating the expression.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...console.errors import MisuseError
from ..sources.fields import element_kind
from . import exact

BUILTIN_FIELDS = {
    "document": "int",
    "tokens": "int",
    "file": "string",
    "position": "int",
    "id": "string",
}
"""Fields that every document has, besides kept fields."""

EXAMPLE = "language == 'en' and score >= 0.8"
SPELLINGS = {
    "=": "==",
    "<>": "!=",
    "&&": " and ",
    "||": " or ",
    "!": "not ",
    **{word.upper(): word for word in ("and", "or", "not", "in", "is")},
    **dict.fromkeys(("null", "NULL", "none", "NONE"), "None"),
    **{word: word.title() for word in ("true", "false")},
    **{word: word.title() for word in ("TRUE", "FALSE")},
}
"""Spellings in SQL and other languages, and Python's."""
SPELLED = re.compile(
    r"('[^']*'|\"[^\"]*\")|<>|\s*(?:&&|\|\|)\s*|(?<![<>=!])=(?!=)|!(?!=)|\b(?:"
    + "|".join(word for word in SPELLINGS if word.isalpha())
    + r")\b"
)
"""A quoted string, or a key in SPELLINGS."""

NUMBERS = ("int", "float")
MAX_LEVELS = 100
"""Nesting depth: every level takes a stack frame in this parser and in pyarrow."""
MAX_CLAUSES = 2_000
"""Comparisons, and operands in `and` and `or`: pyarrow recurses for each."""
MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}


@dataclass(frozen=True)
class Where:
    """A parsed expression over documents."""

    text: str
    expression: Any
    """pyarrow.compute.Expression"""
    names: frozenset[str]
    """Fields that the expression reads."""
    members: tuple[Member, ...] = ()
    """Columns to compute for clauses on list fields."""


@dataclass(frozen=True)
class Member:
    """A boolean column: whether a row's list has an element."""

    column: str
    field: str
    is_element: Any
    """Expression on one element, under the field's name."""


@dataclass(frozen=True)
class _FieldOperand:
    name: str
    kind: str


@dataclass
class _ExpressionParser:
    text: str
    kinds: Mapping[str, str]
    names: set[str] = field(default_factory=set)
    members: list[Member] = field(default_factory=list)

    def condition(self, node: ast.expr) -> Any:
        """Translate a node that is true or false."""
        import pyarrow.compute as pc

        if isinstance(node, ast.BoolOp):
            clauses = [self.condition(value) for value in node.values]
            condition = clauses[0]
            for clause in clauses[1:]:
                condition = (
                    condition & clause if isinstance(node.op, ast.And) else condition | clause
                )
            return condition
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.condition(node.operand)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            comparisons = [
                self.comparison(node, left, operator, right)
                for left, operator, right in zip(sides[:-1], node.ops, sides[1:], strict=True)
            ]
            condition = comparisons[0]
            for clause in comparisons[1:]:
                condition = condition & clause
            return condition
        operand = self.operand(node)
        if isinstance(operand, _FieldOperand) and operand.kind == "bool":
            return pc.field(operand.name)
        raise self.error(node, "it is neither a comparison nor a field of type bool")

    def comparison(
        self, node: ast.Compare, left: ast.expr, node_operator: ast.cmpop, right: ast.expr
    ) -> Any:
        import pyarrow.compute as pc

        if isinstance(node_operator, (ast.In, ast.NotIn)):
            condition = self.membership(node, left, right)
            return ~condition if isinstance(node_operator, ast.NotIn) else condition
        field, value = self.operand(left), self.operand(right)
        if isinstance(node_operator, (ast.Is, ast.IsNot)):
            if not isinstance(field, _FieldOperand) or value is not None:
                raise self.error(node, "`is` compares a field with None")
            null = pc.field(field.name).is_null()
            return ~null if isinstance(node_operator, ast.IsNot) else null
        operator = OPERATORS[type(node_operator)]
        if not isinstance(field, _FieldOperand):
            field, value, operator = value, field, MIRRORED[operator]
        if not isinstance(field, _FieldOperand):
            raise self.error(node, "it compares no field")
        self.check_types(node, field, value)
        if "bool" in (field.kind, _value_kind(value)) and operator not in ("==", "!="):
            raise self.error(node, f"`{field.name}` is a bool, which has no order")
        return _compare(field, operator, value)

    def membership(self, node: ast.Compare, left: ast.expr, right: ast.expr) -> Any:
        """Translate `field in (literals)`, `'part' in field`, or, for lists, `value in field`."""
        import pyarrow.compute as pc

        if isinstance(right, (ast.List, ast.Tuple, ast.Set)):
            field = self.operand(left)
            if not isinstance(field, _FieldOperand):
                raise self.error(node, "a field must stand before `in (…)`")
            values = [self.operand(item) for item in right.elts]
            if not values:
                raise self.error(node, "the list is empty")
            for value in values:
                if isinstance(value, _FieldOperand):
                    raise self.error(node, "the list holds a field; it may hold literals only")
                self.check_types(node, field, value)
            return exact.equals_any(pc.field(field.name), field.kind, values)
        value, field = self.operand(left), self.operand(right)
        if isinstance(field, _FieldOperand) and field.kind == "string" and isinstance(value, str):
            return pc.match_substring(pc.field(field.name), value)
        if isinstance(field, _FieldOperand) and (kind := element_kind(field.kind)) is not None:
            if isinstance(value, _FieldOperand):
                raise self.error(node, f"a literal must stand before `in {field.name}`")
            element = _FieldOperand(field.name, kind)
            self.check_types(node, element, value)
            column = f"{field.name} has [{len(self.members)}]"
            self.members.append(Member(column, field.name, _compare(element, "==", value)))
            return pc.field(column)
        raise self.error(
            node,
            "`in` needs a list of literals, a text in a string, or a value in a field of lists",
        )

    def check_types(self, node: ast.expr, field: _FieldOperand, value: Any) -> None:
        """Raise if a field cannot be compared with `value`, a literal or a field."""
        lists = [
            operand
            for operand in (field, value)
            if isinstance(operand, _FieldOperand) and element_kind(operand.kind)
        ]
        if value is not None and lists:
            name, kind = lists[0].name, lists[0].kind
            raise self.error(node, f"`{name}` is of type {kind}; ask for a value `in {name}`")
        if value is None:
            raise self.error(node, f"compare with None as `{field.name} is None`")
        kind = value.kind if isinstance(value, _FieldOperand) else _value_kind(value)
        if kind != field.kind and not (kind in NUMBERS and field.kind in NUMBERS):
            shown = f"`{value.name}`" if isinstance(value, _FieldOperand) else repr(value)
            raise self.error(
                node, f"`{field.name}` is of type {field.kind}, and {shown} of type {kind}"
            )
        if isinstance(value, int) and not -exact.LIMIT <= value < exact.LIMIT:
            raise self.error(node, f"{value} has more than 64 bits")

    def operand(self, node: ast.expr) -> Any:
        """Translate a field or a literal."""
        if isinstance(node, ast.Constant) and (
            node.value is None or isinstance(node.value, (str, int, float))
        ):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.operand(node.operand)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return -value
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = ast.unparse(node)
            if name not in self.kinds:
                known = ", ".join(f"{name} ({kind})" for name, kind in self.kinds.items())
                fields = f"its fields are {known}; `tokenize build --keep` adds others"
                hint = _spelling_hint(self.text) if name in SPELLINGS else fields
                raise MisuseError(
                    f"the dataset has no field `{name}`", where=self.location(node), hint=hint
                )
            self.names.add(name)
            return _FieldOperand(name, self.kinds[name])
        raise self.error(
            node,
            "an expression has names, numbers, texts in quotes, comparisons, and, or, not, in",
        )

    def error(self, node: ast.expr, reason: str) -> MisuseError:
        return MisuseError(
            f"`{ast.unparse(node)}` has no meaning here: {reason}",
            where=self.location(node),
            hint=_spelling_hint(self.text),
        )

    def location(self, node: ast.expr) -> str:
        return f"--where, character {node.col_offset + 1} of: {self.text}"


def parse(text: str, field_kinds: Mapping[str, str]) -> Where:
    """Parse a text as an expression over a dataset's fields; raise MisuseError."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        position = ""
        if isinstance(error, SyntaxError):  # its offset is 0 where the text ends too early
            position = f", character {error.offset or len(text) + 1}"
        raise MisuseError(
            f"the expression cannot be read: {getattr(error, 'msg', error)}",
            where=f"--where{position} of: {text}",
            hint=_spelling_hint(text),
        ) from None
    _check_size(tree, text)
    parser = _ExpressionParser(text.strip(), {**field_kinds, **BUILTIN_FIELDS})
    expression = parser.condition(tree.body)
    return Where(text.strip(), expression, frozenset(parser.names), tuple(parser.members))


def _spelling_hint(text: str) -> str:
    """Return the hint for an unreadable expression: respelled as Python, if that makes it valid."""
    corrected = SPELLED.sub(lambda match: match[1] or SPELLINGS[match[0].strip()], text.strip())
    corrected = re.sub(r"== None\b", "is None", re.sub(r"!= None\b", "is not None", corrected))
    try:
        ast.parse(corrected, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return f"write for example: {EXAMPLE}"
    if corrected == text.strip():
        return f"write for example: {EXAMPLE}"
    return f"write it as: {corrected}"


def _check_size(tree: ast.AST, text: str) -> None:
    """Raise if this parser or pyarrow would run out of stack."""
    num_levels, num_clauses, level_nodes = 0, 0, [tree]
    while level_nodes:
        num_levels += 1
        num_clauses += sum(len(node.values) for node in level_nodes if isinstance(node, ast.BoolOp))
        num_clauses += sum(len(node.ops) for node in level_nodes if isinstance(node, ast.Compare))
        level_nodes = [child for node in level_nodes for child in ast.iter_child_nodes(node)]
    if num_levels > MAX_LEVELS:
        raise MisuseError(
            f"the expression has more than {MAX_LEVELS} levels within each other",
            where=f"--where {text:.100}…",
            hint="write it with fewer `not`, signs or parentheses within each other",
        )
    if num_clauses > MAX_CLAUSES:
        raise MisuseError(
            f"the expression has more than {MAX_CLAUSES:,} comparisons and parts of `and` and `or`",
            where=f"--where {text:.100}…",
            hint="compare with several values at once, as in language in ('en', 'de')",
        )


def _compare(field: _FieldOperand, operator: str, value: Any) -> Any:
    """Compare a field with a field or a literal."""
    import pyarrow.compute as pc

    left = pc.field(field.name)
    if not isinstance(value, _FieldOperand):
        if field.kind == "int" and isinstance(value, float):
            return exact.compare_int(left, operator, value)
        if field.kind == "float" and isinstance(value, int):
            return exact.compare_float(left, operator, value)
        return exact.COMPARE[operator](left, pc.scalar(value))
    right = pc.field(value.name)
    if (field.kind, value.kind) == ("int", "float"):
        return exact.compare_fields(left, operator, right)
    if (field.kind, value.kind) == ("float", "int"):
        return exact.compare_fields(right, MIRRORED[operator], left)
    return exact.COMPARE[operator](left, right)


def _value_kind(value: Any) -> str:
    for python, kind in ((bool, "bool"), (str, "string"), (int, "int"), (float, "float")):
        if isinstance(value, python):
            return kind
    return "field" if isinstance(value, _FieldOperand) else "null"
