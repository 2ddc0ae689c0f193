"""Documents from rows of Arrow record batches, for Parquet and Arrow files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...dataplane.arrays import Int64
from ...dataplane.tokenizers.marks import Marks
from ..chat.problems import ChatProblem
from .fields import (
    FieldKind,
    arrow_schema,
    column_kind,
    column_type,
    column_values,
    root_column,
    type_problem,
)
from .format import BadRecord, ReadLimits, Slice, SourceConfig, Texts

if TYPE_CHECKING:
    from ..chat.conversation import Chat
    from ..chat.messages import Contents


def columns_to_read(schema: Any, config: SourceConfig) -> list[str]:
    """Return the names of the columns that are read."""
    kept = [root_column(schema, field.name) for field in config.keep]
    names = dict.fromkeys([*own_columns(config, schema.names), *kept])
    return [name for name in names if name in schema.names]  # a file may lack optional fields


def own_columns(config: SourceConfig, names: Sequence[str]) -> list[str]:
    """Return the columns of the text, or of the conversation, and of the id; `names` are the
    columns that there are."""
    return [*_text_columns(config, names), *([config.id_field] if config.id_field else [])]


def _text_columns(config: SourceConfig, names: Sequence[str]) -> list[str]:
    return [config.text_field] if config.chat is None else config.chat.columns(names)


def column_problem(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """Return which of the wanted columns is missing, or is there twice; None if all are right."""
    for name in wanted:
        if (count := names.count(name)) != 1:
            found = f"{count} columns of the name" if count else "no column"
            return f"{found} `{name}` (it has {', '.join(names)})"
    return None


def column_kinds(schema: Any, names: Sequence[str]) -> dict[str, set[FieldKind | str]]:
    """Return the types of columns, by the names of fields."""
    kinds: dict[str, set[FieldKind | str]] = {}
    for name in names:
        try:
            kind = column_kind(column_type(schema, name))
        except KeyError:
            continue
        if kind is not None:
            kinds[name] = {kind}
    return kinds


def schema_problem(schema: Any, part: Slice, config: SourceConfig) -> Texts | None:
    """Return empty Texts if a file lacks the columns, else None. The file's first slice reports
    the problem."""
    import pyarrow as pa

    what = column_problem(schema.names, own_columns(config, schema.names))
    if what is None:
        kept = (type_problem(schema, field) for field in config.keep)
        what = next((problem for problem in kept if problem is not None), None)
        if config.chat is None:
            kind = schema.field(config.text_field).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            strings = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
            if not any(test(kind) for test in strings):
                what = f"column `{config.text_field}` holds {kind}, not text"
        if what is None:
            return None
    problems = [BadRecord("other schema", what, part.file.name)] if part.start == 0 else []
    return Texts([], [], None, problems, part.size)


def small_batches(batch: Any, config: SourceConfig, limits: ReadLimits) -> Iterator[Any]:
    """Cut a batch into pieces of at most `block_bytes` of text, or of one row: Python strings take
    more memory than columns."""
    ends = np.cumsum(_row_sizes(batch, config))
    first = 0
    while first < len(batch):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + limits.block_bytes, side="right"))
        last = max(first + 1, last)
        yield batch.slice(first, last - first)
        first = last


def _row_sizes(batch: Any, config: SourceConfig) -> Int64:
    """Return the bytes of text of each row; of conversations, the mean of the batch."""
    if config.chat is None:
        return _sizes(batch.column(config.text_field))
    return np.full(len(batch), -(-batch.nbytes // max(1, len(batch))), np.int64)


def _sizes(column: Any) -> Int64:
    """Return the bytes of each text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        sizes = pc.take(_sizes(column.dictionary), column.indices)
    elif pa.types.is_string_view(column.type):
        sizes = pc.binary_length(column.cast(pa.large_string()))
    else:
        sizes = pc.binary_length(column)
    filled: Int64 = pc.fill_null(sizes, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return filled


def texts_of(
    batch: Any,
    first: int,
    config: SourceConfig,
    limits: ReadLimits,
    name: str,
    unit: str,
    size: int,
) -> Texts:
    """Return the texts of a batch whose first row has position `first`."""
    import pyarrow as pa

    if len(batch) == 1 and _row_sizes(batch, config)[0] > limits.document_bytes:
        return Texts([], [], None, [BadRecord(*limits.too_large, name, first, unit)], size)
    texts, problems = _values(batch, first, config, name, unit)
    marks: list[Marks] = []
    if config.chat is not None:
        texts, marks = _conversations(texts, config.chat, first, name, unit, problems)
    ids = batch.column(config.id_field).to_pylist() if config.id_field else None
    columns = []
    for field in config.keep:
        values, wide = column_values(batch, field)
        columns.append(values)
        for k in wide:
            what = f"`{field.name}` is an int of more than 64 bits"
            problems.append(BadRecord("other type", what, name, first + k, unit))
            texts[k] = None
    bad = {problem.position for problem in problems}
    kept, positions, own = [], [], []
    for number, text in enumerate(texts, start=first):
        if text is None:
            if number not in bad:
                what = f"column `{config.text_field}` is null"
                problems.append(BadRecord("missing field", what, name, number, unit))
        else:
            kept.append(text)
            positions.append(number)
            if ids is not None:
                id = ids[number - first]
                own.append(None if id is None else str(id))
    fields = None
    if config.keep:
        fields = pa.table(columns, schema=arrow_schema(config.keep))
        fields = fields.take(np.array(positions, np.int64) - first)
    chosen = [marks[number - first] for number in positions] if config.chat else None
    own_ids = own if ids is not None else None
    return Texts(kept, positions, own_ids, problems, size, fields, chosen)


def _values(
    batch: Any, first: int, config: SourceConfig, name: str, unit: str
) -> tuple[list[Any], list[BadRecord]]:
    """Return the text, or the columns of the conversation, of each row; None where it is null or
    cannot be read."""
    import pyarrow as pa

    if config.chat is None:
        column = batch.column(config.text_field)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
    else:
        column = batch.select(_text_columns(config, batch.schema.names)).to_struct_array()
    try:
        return column.to_pylist(), []
    except UnicodeDecodeError:
        values: list[Any] = []
        problems = []
        for number, value in enumerate(column, start=first):
            try:
                values.append(value.as_py())
            except UnicodeDecodeError:
                values.append(None)
                problems.append(BadRecord("invalid UTF-8", "in the text", name, number, unit))
        return values, problems


def _conversations(
    rows: Sequence[Any],
    chat: Chat | Contents,
    first: int,
    name: str,
    unit: str,
    problems: list[BadRecord],
) -> tuple[list[str | None], list[Marks]]:
    """Return the text of each row and its marks; add to `problems`."""
    texts: list[str | None] = []
    marks: list[Marks] = []
    for number, row in enumerate(rows, start=first):
        text, marked = None, Marks()
        try:
            if row is not None:
                text, marked = chat.read(_without_nulls(row))
        except ChatProblem as problem:
            problems.append(BadRecord(problem.kind, str(problem), name, number, unit))
        texts.append(text)
        marks.append(marked)
    return texts, marks


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that are null: rows have all keys that some row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
