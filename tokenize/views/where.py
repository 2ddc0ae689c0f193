"""Expressions over documents: `language == 'en' and score >= 0.8`.

The text is parsed by Python's grammar and never evaluated: comparisons, `and`, `or`, `not`, `in`,
`is None`, names and literals become an expression of pyarrow.compute. A comparison with null is
neither true nor false, as in SQL: the document is not chosen, unless another part chooses it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...console.errors import MisuseError

OWN = {
    "document": "int",
    "tokens": "int",
    "file": "string",
    "position": "int",
    "id": "string",
}
"""Names that every document has, besides its kept fields."""

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


@dataclass(frozen=True)
class _Field:
    name: str
    kind: str


@dataclass
class _Parser:
    text: str
    kinds: Mapping[str, str]
    names: set[str] = field(default_factory=set)

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
            found = self.membership(node, left, right)
            return ~found if isinstance(by, ast.NotIn) else found
        one, other = self.operand(left), self.operand(right)
        if isinstance(by, (ast.Is, ast.IsNot)):
            if not isinstance(one, _Field) or other is not None:
                raise self.wrong(node, "`is` compares a field with None")
            null = pc.field(one.name).is_null()
            return ~null if isinstance(by, ast.IsNot) else null
        operator = OPERATORS[type(by)]
        if not isinstance(one, _Field):
            one, other, operator = other, one, MIRRORED[operator]
        if not isinstance(one, _Field):
            raise self.wrong(node, "it compares no field")
        value = self.matching(node, one, other)
        if "bool" in (one.kind, _kind(other)) and operator not in ("==", "!="):
            raise self.wrong(node, f"`{one.name}` is a bool, which has no order")
        found = pc.field(one.name)
        return {
            "<": found < value,
            "<=": found <= value,
            ">": found > value,
            ">=": found >= value,
            "==": found == value,
            "!=": found != value,
        }[operator]

    def membership(self, node: ast.Compare, left: ast.expr, right: ast.expr) -> Any:
        """Return `field in (literals)`, or `'part' in field`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if isinstance(right, (ast.List, ast.Tuple, ast.Set)):
            one = self.operand(left)
            if not isinstance(one, _Field):
                raise self.wrong(node, "a field must stand before `in (…)`")
            values = [self.operand(item) for item in right.elts]
            if not values:
                raise self.wrong(node, "the list is empty")
            for value in values:
                if isinstance(value, _Field):
                    raise self.wrong(node, "the list holds a field; it may hold literals only")
                self.matching(node, one, value)
            type = {"string": pa.string(), "int": pa.int64(), "bool": pa.bool_()}
            numbers = any(isinstance(value, float) for value in values)
            wanted = pa.array(values, pa.float64() if numbers else type.get(one.kind, pa.float64()))
            found = pc.field(one.name)
            cast = found.cast(pa.float64()) if numbers and one.kind == "int" else found
            return pc.if_else(found.is_valid(), cast.isin(wanted), pa.scalar(None, pa.bool_()))
        part, one = self.operand(left), self.operand(right)
        if isinstance(one, _Field) and one.kind == "string" and isinstance(part, str):
            return pc.match_substring(pc.field(one.name), part)
        raise self.wrong(node, "`in` needs a list of literals, or a text in a field of type string")

    def matching(self, node: ast.expr, one: _Field, other: Any) -> Any:
        """Return the other side of a comparison with a field; raise if its type is another one."""
        import pyarrow.compute as pc

        if other is None:
            raise self.wrong(node, f"compare with None as `{one.name} is None`")
        kind = other.kind if isinstance(other, _Field) else _kind(other)
        if kind != one.kind and not (kind in NUMBERS and one.kind in NUMBERS):
            shown = f"`{other.name}`" if isinstance(other, _Field) else repr(other)
            raise self.wrong(
                node, f"`{one.name}` is of type {one.kind}, and {shown} of type {kind}"
            )
        if isinstance(other, int) and not -(2**63) <= other < 2**63:
            raise self.wrong(node, f"{other} has more than 64 bits")
        return pc.field(other.name) if isinstance(other, _Field) else pc.scalar(other)

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
                raise MisuseError(
                    f"the dataset has no field `{name}`",
                    where=self.place(node),
                    hint=f"its fields are {known}; `tokenize build --keep` adds others",
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
            hint="write for example: language == 'en' and score >= 0.8",
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
            hint="write for example: language == 'en' and score >= 0.8",
        ) from None
    _check_size(tree, text)
    parser = _Parser(text.strip(), {**kept, **OWN})
    expression = parser.condition(tree.body)
    return Where(text.strip(), expression, frozenset(parser.names))


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


def _kind(value: Any) -> str:
    for python, kind in ((bool, "bool"), (str, "string"), (int, "int"), (float, "float")):
        if isinstance(value, python):
            return kind
    return "field" if isinstance(value, _Field) else "null"
