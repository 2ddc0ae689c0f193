"""Fields that a dataset keeps for each document: their names, their types, and values in records.

A kept field has one type in the whole dataset. A value of another type is a bad record; null is
allowed, also as an element of a list. A record without the key is a bad record too, unless the
field is optional: then its value is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

FieldKind = Literal[
    "string", "int", "float", "bool", "list<string>", "list<int>", "list<float>", "list<bool>"
]
FIELD_KINDS: tuple[FieldKind, ...] = get_args(FieldKind)
ELEMENTS: dict[str | None, str] = {
    kind: kind.removeprefix("list<").removesuffix(">") for kind in FIELD_KINDS if "<" in kind
}
"""Types of the elements of lists."""
JSON_KINDS = {str: "string", int: "int", float: "float", bool: "bool", dict: "object"}
"""Types of JSON values by those of Python; arrays are lists."""
EMPTY_LIST = "list"
"""Type of a JSON array without elements, or of nulls alone: any list."""
WIDER = {("int", "float"), ("list<int>", "list<float>")}
"""Types of values, and types of fields that hold them as well."""

RESERVED = {
    "document": "its number in the dataset",
    "tokens": "its length in tokens",
    "file": "the file that it came from",
    "position": "its position in the file",
    "id": "its id in the corpus (--id-field)",
}
"""Names that an expression over documents uses for other things than kept fields."""

TEXTUAL = ("date", "time")
"""Beginnings of Arrow types whose values can be kept as text."""
LIMIT = 1 << 63
"""Integers are stored in 64 bits."""


@dataclass(frozen=True, kw_only=True)
class KeptField:
    """A field that a dataset keeps. Manifests store it: do not rename its attributes."""

    name: str
    """Key of the record, or name of the column; dots lead into nested objects."""
    type: FieldKind | None = None
    """None: the type of the values in the first records of the corpus; `int` and `float` together
    are `float`, values of CSV `string`, never lists. Null is allowed, also as an element."""
    optional: bool = False
    """A record without the key, or a file without the column, has null."""

    def __str__(self) -> str:
        return f"{self.name}:{self.type}{'?' * self.optional}"


class FieldProblem(Exception):
    """A record whose field is missing or has another type."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def check_names(fields: Sequence[KeptField]) -> None:
    """Raise ValueError for a name that stands twice, is empty or is taken."""
    names = [field.name for field in fields]
    for name in names:
        if not name.strip("."):
            raise ValueError("keep has an empty name")
        if name in RESERVED:
            raise ValueError(
                f"keep: every document has `{name}` already: {RESERVED[name]}; rename the field"
            )
        if names.count(name) > 1:
            raise ValueError(f"keep: `{name}` is given twice")


def look_up(record: dict[str, Any], name: str) -> Any:
    """Return the value of a field of a JSON object; raise KeyError if it is missing. A key with
    dots is taken before a path; a path through null is null."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if value is None:
            return None
        if not isinstance(value, dict):
            raise KeyError(name)
        value = value[part]
    return value


def kind_of(value: Any) -> FieldKind | str:
    """Return the type of a JSON value: one of FIELD_KINDS, or a description of another type."""
    kind = JSON_KINDS.get(type(value))
    if kind is not None:
        return kind
    return list_kind({kind_of(element) for element in value if element is not None})


def list_kind(kinds: set[FieldKind | str]) -> FieldKind | str:
    """Return the type of a list whose elements have these types."""
    if not kinds:
        return EMPTY_LIST
    kind = "float" if kinds == {"int", "float"} else "|".join(sorted(kinds))
    return f"list<{kind}>"


def element_kind(kind: str | None) -> str | None:
    """Return the type of the elements of a list that a field may be; None for other types."""
    return ELEMENTS.get(kind)


def value_of(record: dict[str, Any], field: KeptField) -> Any:
    """Return a field of a JSON object as a value of its type, or None; raise FieldProblem."""
    try:
        value = look_up(record, field.name)
    except KeyError:
        if field.optional:
            return None
        known = ", ".join(f"`{key}`" for key in list(record)[:10])
        raise FieldProblem("missing field", f"no field `{field.name}` (it has {known})") from None
    element = ELEMENTS.get(field.type)
    if element is None or not isinstance(value, list):
        return _checked(value, field.type, field.name)
    return [_checked(item, element, f"{field.name}[{k}]") for k, item in enumerate(value)]


def _checked(value: Any, type: str | None, name: str) -> Any:
    """Return a JSON value as a value of a type, or None; raise FieldProblem."""
    if value is None:
        return None
    kind = kind_of(value)
    if type == "float" and kind == "int":
        try:
            return float(value)
        except OverflowError:
            raise FieldProblem("other type", f"`{name}` is too large a number") from None
    if kind != type:
        raise FieldProblem("other type", f"`{name}` is a JSON {kind}, not {type}")
    if kind == "int" and not -LIMIT <= value < LIMIT:
        raise FieldProblem("other type", f"`{name}` is an int of more than 64 bits")
    if kind == "string" and not value.isascii() and not value.isprintable():
        try:
            value.encode()
        except UnicodeEncodeError:
            what = f"half of a surrogate pair in `{name}`"
            raise FieldProblem("invalid UTF-8", what) from None
    return value


def value_of_text(text: str, field: KeptField) -> Any:
    """Return a value of a CSV file as a value of the field's type; nothing is null."""
    if text == "":
        return None
    try:
        if field.type == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        value: Any = {"string": str, "int": int, "float": float}[str(field.type)](text)
    except (ValueError, KeyError):
        raise FieldProblem("other type", f"`{field.name}` is {text!r}, not {field.type}") from None
    if field.type == "int" and not -LIMIT <= value < LIMIT:
        raise FieldProblem("other type", f"`{field.name}` is an int of more than 64 bits")
    return value


def arrow_schema(fields: Sequence[KeptField]) -> Any:
    """Return the Arrow schema of kept fields."""
    import pyarrow as pa

    types = {"string": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    types |= {f"list<{kind}>": pa.list_(type) for kind, type in types.items()}
    return pa.schema([(field.name, types[str(field.type)]) for field in fields])


def table_of(rows: Sequence[Sequence[Any]], fields: Sequence[KeptField]) -> Any:
    """Return a table of the values of documents, in the order of `fields`."""
    import pyarrow as pa

    schema = arrow_schema(fields)
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(fields)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
    return pa.table(arrays, schema=schema)


def no_values(count: int, fields: Sequence[KeptField]) -> Any:
    """Return the table of documents of a format without fields: every value is null."""
    import pyarrow as pa

    schema = arrow_schema(fields)
    return pa.table([pa.nulls(count, kind) for kind in schema.types], schema=schema)


# Columns of Parquet and Arrow files


def column_kind(type: Any) -> FieldKind | str | None:
    """Return the type of a column: one of FIELD_KINDS, None for nulls alone, or its Arrow type."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(type):
        type = type.value_type
    tests: dict[FieldKind, tuple[Any, ...]] = {
        "string": (types.is_string, types.is_large_string, types.is_string_view),
        "int": (types.is_integer,),
        "float": (types.is_floating, types.is_decimal),
        "bool": (types.is_boolean,),
    }
    for kind, those in tests.items():
        if any(test(type) for test in those):
            return kind
    if any(test(type) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        element = column_kind(type.value_type)
        if types.is_dictionary(type.value_type) or element not in tests:
            return None if element is None else str(type)
        return f"list<{element}>"
    return None if types.is_null(type) else str(type)


def column_type(schema: Any, name: str) -> Any:
    """Return the Arrow type of a column or of a path into structs; raise KeyError."""
    import pyarrow as pa

    if schema.names.count(name) == 1:
        return schema.field(name).type
    first, *rest = name.split(".")
    if not rest or schema.names.count(first) != 1:
        raise KeyError(name)
    type = schema.field(first).type
    for part in rest:
        if not pa.types.is_struct(type) or type.get_field_index(part) < 0:
            raise KeyError(name)
        type = type.field(part).type
    return type


def root_column(schema: Any, name: str) -> str:
    """Return the column of the file that holds a field."""
    return name if name in schema.names else name.split(".")[0]


def type_problem(schema: Any, field: KeptField) -> str | None:
    """Return why a column cannot be the field of its type, or None."""
    try:
        type = column_type(schema, field.name)
    except KeyError:
        missing = f"no column `{field.name}` (it has {', '.join(schema.names)})"
        return None if field.optional else missing
    kind = column_kind(type)
    if kind in (None, field.type) or (kind, field.type) in WIDER:
        return None
    if field.type == "string" and str(type).startswith(TEXTUAL):
        return None
    holds = f"{type} ({kind})" if kind in FIELD_KINDS and kind != str(type) else type
    return f"column `{field.name}` holds {holds}, not {field.type}"


def column_values(batch: Any, field: KeptField) -> tuple[Any, list[int]]:
    """Return a field of a record batch as an array of its type, and the rows whose value has no
    such form (integers of more than 64 bits); those are null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = batch.schema.names
    first, *rest = [field.name] if field.name in names else field.name.split(".")
    type = arrow_schema([field]).types[0]
    try:
        column_type(batch.schema, field.name)
    except KeyError:  # an optional field
        return pa.nulls(len(batch), type), []
    column = batch.column(names.index(first))
    if rest:
        column = pc.struct_field(column, rest)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.cast(type), []
    except pa.ArrowInvalid:
        wide = [k for k, value in enumerate(column.to_pylist()) if not _fits(value)]
        chosen = pa.array([k not in set(wide) for k in range(len(column))])
        nothing = pa.scalar(None, column.type)
        return pc.if_else(chosen, column, nothing).cast(type, safe=False), wide


def _fits(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_fits, value))
    return not isinstance(value, int) or -LIMIT <= value < LIMIT
