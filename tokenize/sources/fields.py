"""Kept fields: their types, and their values in records of JSON, CSV, Parquet and Arrow.

A kept field has one kind in the whole dataset, such as `list<int>` (FieldKind), which manifests
store as `type`; any other `type` here is Arrow's. A value of another kind makes its record a bad
one; null is allowed, also as an element of a list. A record without the key is bad too, unless the
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
ELEMENT_KINDS: dict[str | None, str] = {
    kind: kind.removeprefix("list<").removesuffix(">") for kind in FIELD_KINDS if "<" in kind
}
"""Kind of the elements, by kind of the list."""
JSON_KINDS = {str: "string", int: "int", float: "float", bool: "bool", dict: "object"}
"""Kinds of JSON values other than arrays, by Python type."""
EMPTY_LIST = "list"
"""Kind of a JSON array that is empty or holds only nulls: it fits any list."""
WIDENINGS = {("int", "float"), ("list<int>", "list<float>")}
"""(kind of the values, kind of a field that can hold them too)."""

RESERVED = {
    "document": "its number in the dataset",
    "tokens": "its length in tokens",
    "file": "the file that it came from",
    "position": "its position in the file",
    "id": "its id in the corpus (--id-field)",
}
"""Names with another meaning in expressions over documents: no kept field may have them."""

TEXT_TYPE_PREFIXES = ("date", "time")
"""Arrow types that begin so can be kept as text."""
INT64_END = 1 << 63
"""Integers are stored in 64 bits, from -INT64_END to INT64_END - 1."""


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
    """A record's field is missing, or its value cannot be kept."""

    def __init__(self, kind: str, message: str) -> None:
        """`kind` names the problem, as the counts of bad records list it."""
        super().__init__(message)
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


def find_value(record: dict[str, Any], name: str) -> Any:
    """Find a field's value in a JSON object by its key or, with dots, by its path; a key that
    contains dots wins. A path through null is null. Raise KeyError if the field is missing."""
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
    """Return a JSON value's kind: one of FIELD_KINDS, or a description for people."""
    kind = JSON_KINDS.get(type(value))
    if kind is not None:
        return kind
    # No kind names lists of lists, and JSON may nest them deeper than Python may call.
    return list_kind({JSON_KINDS.get(type(x), EMPTY_LIST) for x in value if x is not None})


def list_kind(kinds: set[FieldKind | str]) -> FieldKind | str:
    """Return the kind of a list whose elements are of these kinds."""
    if not kinds:
        return EMPTY_LIST
    kind = "float" if kinds == {"int", "float"} else "|".join(sorted(kinds))
    return f"list<{kind}>"


def element_kind(kind: str | None) -> str | None:
    """Return the kind of a list's elements; None if `kind` is no list."""
    return ELEMENT_KINDS.get(kind)


def read_json_value(record: dict[str, Any], field: KeptField) -> Any:
    """Read a field from a JSON object, as a value of the field's kind or None. Raise FieldProblem
    if the field is missing or its value has another kind."""
    try:
        value = find_value(record, field.name)
    except KeyError:
        if field.optional:
            return None
        known = ", ".join(f"`{key}`" for key in list(record)[:10])
        raise FieldProblem("missing field", f"no field `{field.name}` (it has {known})") from None
    list_element_kind = element_kind(field.type)
    if list_element_kind is None or not isinstance(value, list):
        return _check_json_value(value, field.type, field.name)
    return [
        _check_json_value(element, list_element_kind, f"{field.name}[{index}]")
        for index, element in enumerate(value)
    ]


def _check_json_value(value: Any, expected_kind: str | None, name: str) -> Any:
    """Check a JSON value, and widen it if needed; None stays None. Raise FieldProblem if the value
    cannot be kept under `name`."""
    if value is None:
        return None
    kind = json_kind(value)
    if expected_kind == "float" and kind == "int":
        try:
            return float(value)
        except OverflowError:
            raise FieldProblem("other type", f"`{name}` is too large a number") from None
    if kind != expected_kind:
        raise FieldProblem("other type", f"`{name}` is a JSON {kind}, not {expected_kind}")
    if kind == "int" and not -INT64_END <= value < INT64_END:
        raise FieldProblem("other type", f"`{name}` is an int of more than 64 bits")
    if kind == "string" and not value.isascii() and not value.isprintable():
        try:
            value.encode()
        except UnicodeEncodeError:
            message = f"half of a surrogate pair in `{name}`"
            raise FieldProblem("invalid UTF-8", message) from None
    return value


def parse_csv_value(text: str, field: KeptField) -> Any:
    """Parse a value in a CSV file as the field's kind; an empty value is null. Raise FieldProblem
    for other text."""
    if text == "":
        return None
    try:
        if field.type == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        value: Any = {"string": str, "int": int, "float": float}[str(field.type)](text)
    except (ValueError, KeyError):
        raise FieldProblem("other type", f"`{field.name}` is {text!r}, not {field.type}") from None
    if field.type == "int" and not -INT64_END <= value < INT64_END:
        raise FieldProblem("other type", f"`{field.name}` is an int of more than 64 bits")
    return value


def arrow_schema(fields: Sequence[KeptField]) -> Any:
    """Return a pyarrow.Schema with a column per kept field."""
    import pyarrow as pa

    types = {"string": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    types |= {f"list<{kind}>": pa.list_(type) for kind, type in types.items()}
    return pa.schema([(field.name, types[str(field.type)]) for field in fields])


def build_table(rows: Sequence[Sequence[Any]], fields: Sequence[KeptField]) -> Any:
    """Build a pyarrow.Table with a row per document, whose values are in the order of `fields`."""
    import pyarrow as pa

    schema = arrow_schema(fields)
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(fields)
    arrays = [pa.array(values, type) for values, type in zip(columns, schema.types, strict=True)]
    return pa.table(arrays, schema=schema)


def null_table(num_rows: int, fields: Sequence[KeptField]) -> Any:
    """Return a pyarrow.Table of nulls, for documents in a format without fields."""
    import pyarrow as pa

    schema = arrow_schema(fields)
    return pa.table([pa.nulls(num_rows, type) for type in schema.types], schema=schema)


# Columns of Parquet and Arrow files


def column_kind(type: Any) -> FieldKind | str | None:
    """Return the kind of a column with an Arrow type: one of FIELD_KINDS, None if it is all nulls,
    or else the name of the Arrow type."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(type):
        type = type.value_type
    scalar_tests: dict[FieldKind, tuple[Any, ...]] = {
        "string": (types.is_string, types.is_large_string, types.is_string_view),
        "int": (types.is_integer,),
        "float": (types.is_floating, types.is_decimal),
        "bool": (types.is_boolean,),
    }
    for kind, tests in scalar_tests.items():
        if any(test(type) for test in tests):
            return kind
    if any(test(type) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        kind_inside = column_kind(type.value_type)
        if types.is_dictionary(type.value_type) or kind_inside not in scalar_tests:
            return None if kind_inside is None else str(type)
        return f"list<{kind_inside}>"
    return None if types.is_null(type) else str(type)


def column_type(schema: Any, name: str) -> Any:
    """Return the Arrow type of a column or, with dots, of a path into structs. Raise KeyError if it
    is missing or not unique."""
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
    """Return the name of the file's column that contains a field."""
    return name if name in schema.names else name.split(".")[0]


def type_problem(schema: Any, field: KeptField) -> str | None:
    """Explain why a column cannot be this field; None if it can."""
    try:
        type = column_type(schema, field.name)
    except KeyError:
        missing = f"no column `{field.name}` (it has {', '.join(schema.names)})"
        return None if field.optional else missing
    kind = column_kind(type)
    if kind in (None, field.type) or (kind, field.type) in WIDENINGS:
        return None
    if field.type == "string" and str(type).startswith(TEXT_TYPE_PREFIXES):
        return None
    description = f"{type} ({kind})" if kind in FIELD_KINDS and kind != str(type) else type
    return f"column `{field.name}` holds {description}, not {field.type}"


def read_column(batch: Any, field: KeptField) -> tuple[Any, list[int]]:
    """Read a field from a pyarrow.RecordBatch, as an array of the field's type. Also return the
    indices of rows with integers of more than 64 bits, which are null in the array."""
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
        fits = [_fits_int64(value) for value in column.to_pylist()]
        null = pa.scalar(None, column.type)
        kept = pc.if_else(pa.array(fits), column, null).cast(type, safe=False)
        return kept, [row for row, row_fits in enumerate(fits) if not row_fits]


def _fits_int64(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_fits_int64, value))
    return not isinstance(value, int) or -INT64_END <= value < INT64_END
