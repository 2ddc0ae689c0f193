"""Expressions over documents: `language == 'en' and score >= 0.8`.

The text is parsed by Python's grammar and never evaluated: comparisons, `and`, `or`, `not`, `in`,
`is None`, names and literals become an expression of pyarrow.compute. A comparison with null is
neither true nor false, as in SQL: the document is not chosen, unless another part chooses it.

pyarrow has no function that finds a value in a field of lists: such a part is a column that the
caller computes (`Member`) before it evaluates the expression.
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

OWN = {
    "document": "int",
    "tokens": "int",
    "file": "string",
    "position": "int",
    "id": "string",
}
"""Names that every document has, besides its kept fields."""

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
"""What SQL and other languages write, and what is meant by it here."""
SPELLED = re.compile(
    r"('[^']*'|\"[^\"]*\")|<>|\s*(?:&&|\|\|)\s*|(?<![<>=!])=(?!=)|!(?!=)|\b(?:"
    + "|".join(word for word in SPELLINGS if word.isalpha())
    + r")\b"
)
"""A text in quotes, or one of SPELLINGS."""

NUMBERS = ("int", "float")
MOST_LEVELS = 100
"""Levels of an expression within each other: each takes a call of this parser and of pyarrow."""
MOST_PARTS = 2_000
"""Comparisons, and parts of `and` and `or`: pyarrow calls itself for each of them."""
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
    """An expression over documents."""

    text: str
    expression: Any
    """pyarrow.compute.Expression"""
    names: frozenset[str]
    """Fields that it reads."""
    members: tuple[Member, ...] = ()
    """Columns that the expression reads besides its fields."""


@dataclass(frozen=True)
class Member:
    """A column: whether the list of a field has an element."""

    column: str
    field: str
    is_element: Any
    """Expression over the field's name that is true for such an element."""


@dataclass(frozen=True)
class _Field:
    name: str
    kind: str


@dataclass
class _Parser:
    text: str
    kinds: Mapping[str, str]
    names: set[str] = field(default_factory=set)
    members: list[Member] = field(default_factory=list)

    def condition(self, node: ast.expr) -> Any:
        """Return a part of the text that is true or false."""
        import pyarrow.compute as pc

        if isinstance(node, ast.BoolOp):
            parts = [self.condition(value) for value in node.values]
            joined = parts[0]
            for part in parts[1:]:
                joined = joined & part if isinstance(node.op, ast.And) else joined | part
            return joined
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.condition(node.operand)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            compared = [
                self.comparison(node, left, operator, right)
                for left, operator, right in zip(sides[:-1], node.ops, sides[1:], strict=True)
            ]
            joined = compared[0]
            for part in compared[1:]:
                joined = joined & part
            return joined
        operand = self.operand(node)
        if isinstance(operand, _Field) and operand.kind == "bool":
            return pc.field(operand.name)
        raise self.wrong(node, "it is neither a comparison nor a field of type bool")

    def comparison(self, node: ast.Compare, left: ast.expr, by: ast.cmpop, right: ast.expr) -> Any:
        import pyarrow.compute as pc

        if isinstance(by, (ast.In, ast.NotIn)):
            member = self.membership(node, left, right)
            return ~member if isinstance(by, ast.NotIn) else member
        field, value = self.operand(left), self.operand(right)
        if isinstance(by, (ast.Is, ast.IsNot)):
            if not isinstance(field, _Field) or value is not None:
                raise self.wrong(node, "`is` compares a field with None")
            null = pc.field(field.name).is_null()
            return ~null if isinstance(by, ast.IsNot) else null
        operator = OPERATORS[type(by)]
        if not isinstance(field, _Field):
            field, value, operator = value, field, MIRRORED[operator]
        if not isinstance(field, _Field):
            raise self.wrong(node, "it compares no field")
        self.check_types(node, field, value)
        if "bool" in (field.kind, _kind(value)) and operator not in ("==", "!="):
            raise self.wrong(node, f"`{field.name}` is a bool, which has no order")
        return _compared(field, operator, value)

    def membership(self, node: ast.Compare, left: ast.expr, right: ast.expr) -> Any:
        """Return `field in (literals)`, `'part' in field`, or `value in field` of a list."""
        import pyarrow.compute as pc

        if isinstance(right, (ast.List, ast.Tuple, ast.Set)):
            field = self.operand(left)
            if not isinstance(field, _Field):
                raise self.wrong(node, "a field must stand before `in (…)`")
            values = [self.operand(item) for item in right.elts]
            if not values:
                raise self.wrong(node, "the list is empty")
            for value in values:
                if isinstance(value, _Field):
                    raise self.wrong(node, "the list holds a field; it may hold literals only")
                self.check_types(node, field, value)
            return exact.is_in(pc.field(field.name), field.kind, values)
        value, field = self.operand(left), self.operand(right)
        if isinstance(field, _Field) and field.kind == "string" and isinstance(value, str):
            return pc.match_substring(pc.field(field.name), value)
        if isinstance(field, _Field) and (kind := element_kind(field.kind)) is not None:
            if isinstance(value, _Field):
                raise self.wrong(node, f"a literal must stand before `in {field.name}`")
            element = _Field(field.name, kind)
            self.check_types(node, element, value)
            column = f"{field.name} has [{len(self.members)}]"
            self.members.append(Member(column, field.name, _compared(element, "==", value)))
            return pc.field(column)
        raise self.wrong(
            node,
            "`in` needs a list of literals, a text in a string, or a value in a field of lists",
        )

    def check_types(self, node: ast.expr, field: _Field, value: Any) -> None:
        """Raise if a field cannot be compared with a value, which is a literal or a field."""
        lists = [at for at in (field, value) if isinstance(at, _Field) and element_kind(at.kind)]
        if value is not None and lists:
            name, kind = lists[0].name, lists[0].kind
            raise self.wrong(node, f"`{name}` is of type {kind}; ask for a value `in {name}`")
        if value is None:
            raise self.wrong(node, f"compare with None as `{field.name} is None`")
        kind = value.kind if isinstance(value, _Field) else _kind(value)
        if kind != field.kind and not (kind in NUMBERS and field.kind in NUMBERS):
            shown = f"`{value.name}`" if isinstance(value, _Field) else repr(value)
            raise self.wrong(
                node, f"`{field.name}` is of type {field.kind}, and {shown} of type {kind}"
            )
        if isinstance(value, int) and not -exact.LIMIT <= value < exact.LIMIT:
            raise self.wrong(node, f"{value} has more than 64 bits")

    def operand(self, node: ast.expr) -> Any:
        """Return a field or a literal."""
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
                hint = _hint_for(self.text) if name in SPELLINGS else fields
                raise MisuseError(
                    f"the dataset has no field `{name}`", where=self.place(node), hint=hint
                )
            self.names.add(name)
            return _Field(name, self.kinds[name])
        raise self.wrong(
            node,
            "an expression has names, numbers, texts in quotes, comparisons, and, or, not, in",
        )

    def wrong(self, node: ast.expr, why: str) -> MisuseError:
        return MisuseError(
            f"`{ast.unparse(node)}` has no meaning here: {why}",
            where=self.place(node),
            hint=_hint_for(self.text),
        )

    def place(self, node: ast.expr) -> str:
        return f"--where, character {node.col_offset + 1} of: {self.text}"


def parse(text: str, kept: Mapping[str, str]) -> Where:
    """Return the expression of a text over the fields of a dataset; raise for a wrong one."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = ""
        if isinstance(error, SyntaxError):  # its offset is 0 where the text ends too early
            at = f", character {error.offset or len(text) + 1}"
        raise MisuseError(
            f"the expression cannot be read: {getattr(error, 'msg', error)}",
            where=f"--where{at} of: {text}",
            hint=_hint_for(text),
        ) from None
    _check_size(tree, text)
    parser = _Parser(text.strip(), {**kept, **OWN})
    expression = parser.condition(tree.body)
    return Where(text.strip(), expression, frozenset(parser.names), tuple(parser.members))


def _hint_for(text: str) -> str:
    """Return the hint for an expression that cannot be read: the same one in Python's words, if
    they are what it lacks."""
    meant = SPELLED.sub(lambda match: match[1] or SPELLINGS[match[0].strip()], text.strip())
    meant = re.sub(r"== None\b", "is None", re.sub(r"!= None\b", "is not None", meant))
    try:
        ast.parse(meant, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return f"write for example: {EXAMPLE}"
    return f"write it as: {meant}" if meant != text.strip() else f"write for example: {EXAMPLE}"


def _check_size(tree: ast.AST, text: str) -> None:
    """Raise for an expression on which this parser or pyarrow would run out of stack."""
    levels, parts, nodes = 0, 0, [tree]
    while nodes:
        levels += 1
        parts += sum(len(node.values) for node in nodes if isinstance(node, ast.BoolOp))
        parts += sum(len(node.ops) for node in nodes if isinstance(node, ast.Compare))
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node)]
    if levels > MOST_LEVELS:
        raise MisuseError(
            f"the expression has more than {MOST_LEVELS} levels within each other",
            where=f"--where {text:.100}…",
            hint="write it with fewer `not`, signs or parentheses within each other",
        )
    if parts > MOST_PARTS:
        raise MisuseError(
            f"the expression has more than {MOST_PARTS:,} comparisons and parts of `and` and `or`",
            where=f"--where {text:.100}…",
            hint="compare with several values at once, as in language in ('en', 'de')",
        )


def _compared(field: _Field, by: str, value: Any) -> Any:
    """Return the comparison of a field with a field or a literal."""
    import pyarrow.compute as pc

    left = pc.field(field.name)
    if not isinstance(value, _Field):
        if field.kind == "int" and isinstance(value, float):
            return exact.compare_int(left, by, value)
        if field.kind == "float" and isinstance(value, int):
            return exact.compare_float(left, by, value)
        return exact.COMPARE[by](left, pc.scalar(value))
    right = pc.field(value.name)
    if (field.kind, value.kind) == ("int", "float"):
        return exact.compare_fields(left, by, right)
    if (field.kind, value.kind) == ("float", "int"):
        return exact.compare_fields(right, MIRRORED[by], left)
    return exact.COMPARE[by](left, right)


def _kind(value: Any) -> str:
    for python, kind in ((bool, "bool"), (str, "string"), (int, "int"), (float, "float")):
        if isinstance(value, python):
            return kind
    return "field" if isinstance(value, _Field) else "null"
