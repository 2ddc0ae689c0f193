"""Kept fields: names, types, and values in records.

A kept field has one type in the whole dataset. A value of another type is a bad record; null is
allowed, also as an element of a list. A record without the key is a bad record too, unless the
field is optional: then the value is null.
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
"""Element types, by list type."""
JSON_KINDS = {str: "string", int: "int", float: "float", bool: "bool", dict: "object"}
"""Types of JSON values, by Python type; arrays are lists."""
EMPTY_LIST = "list"
"""Type of a JSON array that is empty or holds only nulls: it fits any list."""
WIDER = {("int", "float"), ("list<int>", "list<float>")}
"""(value type, wider field type that can hold the value)."""

RESERVED = {
    "document": "its number in the dataset",
    "tokens": "its length in tokens",
    "file": "the file that it came from",
    "position": "its position in the file",
    "id": "its id in the corpus (--id-field)",
}
"""Names with another meaning in expressions over documents: no kept field may have them."""

TEXTUAL = ("date", "time")
"""Prefixes for Arrow types whose values can be kept as text."""
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
    """A record's field is missing or has another type."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def check_names(fields: Sequence[KeptField]) -> None:
    """Raise ValueError for a name that is repeated, empty or reserved."""
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
    """Look up a field in a JSON object; raise KeyError if it is missing. A key that contains dots
    wins over a path; a path through null is null."""
    if name in record:
        return record[name]
    value: Any = record
    for key in name.split("."):
        if value is None:
            return None
        if not isinstance(value, dict):
            raise KeyError(name)
        value = value[key]
    return value


def json_kind(value: Any) -> FieldKind | str:
    """Return a JSON value's type: one of FIELD_KINDS, or a description of another type."""
    kind = JSON_KINDS.get(type(value))
    if kind is not None:
        return kind
    return list_kind({json_kind(element) for element in value if element is not None})


def list_kind(kinds: set[FieldKind | str]) -> FieldKind | str:
    """Return the type of a list with elements of these types."""
    if not kinds:
        return EMPTY_LIST
    kind = "float" if kinds == {"int", "float"} else "|".join(sorted(kinds))
    return f"list<{kind}>"


def element_kind(kind: str | None) -> str | None:
    """Return the element type of a list type; None for other types."""
    return ELEMENTS.get(kind)


def json_value(record: dict[str, Any], field: KeptField) -> Any:
    """Read a field from a JSON object, as a value of the field's type or None; raise
    FieldProblem."""
    try:
        value = look_up(record, field.name)
    except KeyError:
        if field.optional:
            return None
        known = ", ".join(f"`{key}`" for key in list(record)[:10])
        raise FieldProblem("missing field", f"no field `{field.name}` (it has {known})") from None
    element = ELEMENTS.get(field.type)
    if element is None or not isinstance(value, list):
        return _check_value(value, field.type, field.name)
    return [_check_value(item, element, f"{field.name}[{k}]") for k, item in enumerate(value)]


def _check_value(value: Any, type: str | None, name: str) -> Any:
    """Convert a JSON value to a type; None stays None; raise FieldProblem."""
    if value is None:
        return None
    kind = json_kind(value)
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
            message = f"half of a surrogate pair in `{name}`"
            raise FieldProblem("invalid UTF-8", message) from None
    return value


def parse_value(text: str, field: KeptField) -> Any:
    """Parse a value in a CSV file as the field's type; an empty value is null."""
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


def build_table(rows: Sequence[Sequence[Any]], fields: Sequence[KeptField]) -> Any:
    """Build a table from documents' values, given in the order of `fields`."""
    import pyarrow as pa

    schema = arrow_schema(fields)
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(fields)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
    return pa.table(arrays, schema=schema)


def null_table(count: int, fields: Sequence[KeptField]) -> Any:
    """Return a table with only nulls, for documents in a format without fields."""
    import pyarrow as pa

    schema = arrow_schema(fields)
    return pa.table([pa.nulls(count, kind) for kind in schema.types], schema=schema)


# Columns of Parquet and Arrow files


def column_kind(type: Any) -> FieldKind | str | None:
    """Return a column's type: one of FIELD_KINDS, None if it is all nulls, or the Arrow type."""
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
    for kind, type_tests in tests.items():
        if any(test(type) for test in type_tests):
            return kind
    if any(test(type) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        element_type = column_kind(type.value_type)
        if types.is_dictionary(type.value_type) or element_type not in tests:
            return None if element_type is None else str(type)
        return f"list<{element_type}>"
    return None if types.is_null(type) else str(type)


def column_type(schema: Any, name: str) -> Any:
    """Return the Arrow type of a column, or of a path into structs; raise KeyError."""
    import pyarrow as pa

    if schema.names.count(name) == 1:
        return schema.field(name).type
    first, *nested = name.split(".")
    if not nested or schema.names.count(first) != 1:
        raise KeyError(name)
    type = schema.field(first).type
    for field_name in nested:
        if not pa.types.is_struct(type) or type.get_field_index(field_name) < 0:
            raise KeyError(name)
        type = type.field(field_name).type
    return type


def root_column(schema: Any, name: str) -> str:
    """Return the file's column that contains a field."""
    return name if name in schema.names else name.split(".")[0]


def type_problem(schema: Any, field: KeptField) -> str | None:
    """Explain why a column cannot be this field; None if it can."""
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
    description = f"{type} ({kind})" if kind in FIELD_KINDS and kind != str(type) else type
    return f"column `{field.name}` holds {description}, not {field.type}"


def column_values(batch: Any, field: KeptField) -> tuple[Any, list[int]]:
    """Return a record batch's values of a field, as an array of the field's type, and the rows with
    integers of more than 64 bits: those values are null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = batch.schema.names
    first, *nested = [field.name] if field.name in names else field.name.split(".")
    type = arrow_schema([field]).types[0]
    try:
        column_type(batch.schema, field.name)
    except KeyError:  # an optional field
        return pa.nulls(len(batch), type), []
    column = batch.column(names.index(first))
    if nested:
        column = pc.struct_field(column, nested)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.cast(type), []
    except pa.ArrowInvalid:
        too_large = [k for k, value in enumerate(column.to_pylist()) if not _fits_int64(value)]
        fits = pa.array([k not in set(too_large) for k in range(len(column))])
        null = pa.scalar(None, column.type)
        return pc.if_else(fits, column, null).cast(type, safe=False), too_large


def _fits_int64(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_fits_int64, value))
    return not isinstance(value, int) or -LIMIT <= value < LIMIT
