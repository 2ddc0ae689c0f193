"""Documents from Arrow record batches, row by row, for Parquet and Arrow files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...dataplane.arrays import Int64
from ...dataplane.tokenizers.marks import TextSpans
from ..chat.problems import ChatProblem
from .fields import (
    FieldKind,
    arrow_schema,
    column_kind,
    column_type,
    read_column,
    root_column,
    type_problem,
)
from .format import BadRecord, ReadLimits, Slice, SourceConfig, Texts

if TYPE_CHECKING:
    from ..chat.conversation import Chat
    from ..chat.messages import MessageContents


def columns_to_read(schema: Any, config: SourceConfig) -> list[str]:
    """Return which columns to read."""
    kept = [root_column(schema, field.name) for field in config.keep]
    names = dict.fromkeys([*document_columns(config, schema.names), *kept])
    return [name for name in names if name in schema.names]  # a file may lack optional fields


def document_columns(config: SourceConfig, names: Sequence[str]) -> list[str]:
    """Return the columns that hold the text or conversation, and the id; `names` are the file's
    columns."""
    return [*_text_columns(config, names), *([config.id_field] if config.id_field else [])]


def _text_columns(config: SourceConfig, names: Sequence[str]) -> list[str]:
    return [config.text_field] if config.chat is None else config.chat.columns(names)


def column_problem(names: Sequence[str], required: Sequence[str]) -> str | None:
    """Name a required column that is missing or exists twice; None if there is none."""
    for name in required:
        if (count := names.count(name)) != 1:
            description = f"{count} columns of the name" if count else "no column"
            return f"{description} `{name}` (it has {', '.join(names)})"
    return None


def column_kinds(schema: Any, names: Sequence[str]) -> dict[str, set[FieldKind | str]]:
    """Return column types, by field name."""
    kinds: dict[str, set[FieldKind | str]] = {}
    for name in names:
        try:
            kind = column_kind(column_type(schema, name))
        except KeyError:
            continue
        if kind is not None:
            kinds[name] = {kind}
    return kinds


def schema_problem(schema: Any, file_slice: Slice, config: SourceConfig) -> Texts | None:
    """Return empty Texts if a file lacks columns, else None. The file's first slice reports the
    problem."""
    import pyarrow as pa

    message = column_problem(schema.names, document_columns(config, schema.names))
    if message is None:
        problems = (type_problem(schema, field) for field in config.keep)
        message = next((problem for problem in problems if problem is not None), None)
        if config.chat is None:
            text_type = schema.field(config.text_field).type
            text_type = text_type.value_type if pa.types.is_dictionary(text_type) else text_type
            strings = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
            if not any(test(text_type) for test in strings):
                message = f"column `{config.text_field}` holds {text_type}, not text"
        if message is None:
            return None
    bad_record = BadRecord("other schema", message, file_slice.file.name)
    return Texts([], [], None, [bad_record] if file_slice.start == 0 else [], file_slice.size)


def split_batch(batch: Any, config: SourceConfig, limits: ReadLimits) -> Iterator[Any]:
    """Split a batch into pieces with at most `block_bytes` of text, or one row: Python strings take
    more memory than columns."""
    ends = np.cumsum(_row_sizes(batch, config))
    start = 0
    while start < len(batch):
        start_bytes = int(ends[start - 1]) if start else 0
        end = int(np.searchsorted(ends, start_bytes + limits.block_bytes, side="right"))
        end = max(start + 1, end)
        yield batch.slice(start, end - start)
        start = end


def _row_sizes(batch: Any, config: SourceConfig) -> Int64:
    """Return text bytes by row; for conversations, the batch's mean."""
    if config.chat is None:
        return _text_sizes(batch.column(config.text_field))
    return np.full(len(batch), -(-batch.nbytes // max(1, len(batch))), np.int64)


def _text_sizes(column: Any) -> Int64:
    """Return text sizes in bytes, by row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        sizes = pc.take(_text_sizes(column.dictionary), column.indices)
    elif pa.types.is_string_view(column.type):
        sizes = pc.binary_length(column.cast(pa.large_string()))
    else:
        sizes = pc.binary_length(column)
    filled: Int64 = pc.fill_null(sizes, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return filled


def read_texts(
    batch: Any,
    first: int,
    config: SourceConfig,
    limits: ReadLimits,
    name: str,
    unit: str,
    size: int,
) -> Texts:
    """Read the texts in a batch; `first` is its first row's position."""
    import pyarrow as pa

    if len(batch) == 1 and _row_sizes(batch, config)[0] > limits.document_bytes:
        return Texts([], [], None, [BadRecord(*limits.too_large, name, first, unit)], size)
    texts, problems = _values(batch, first, config, name, unit)
    marks: list[TextSpans] = []
    if config.chat is not None:
        texts, marks = _conversations(texts, config.chat, first, name, unit, problems)
    ids = batch.column(config.id_field).to_pylist() if config.id_field else None
    columns = []
    for field in config.keep:
        values, too_large = read_column(batch, field)
        columns.append(values)
        for k in too_large:
            message = f"`{field.name}` is an int of more than 64 bits"
            problems.append(BadRecord("other type", message, name, first + k, unit))
            texts[k] = None
    bad = {problem.position for problem in problems}
    kept_texts, positions, kept_ids = [], [], []
    for position, text in enumerate(texts, start=first):
        if text is None:
            if position not in bad:
                message = f"column `{config.text_field}` is null"
                problems.append(BadRecord("missing field", message, name, position, unit))
        else:
            kept_texts.append(text)
            positions.append(position)
            if ids is not None:
                id = ids[position - first]
                kept_ids.append(None if id is None else str(id))
    fields = None
    if config.keep:
        fields = pa.table(columns, schema=arrow_schema(config.keep))
        fields = fields.take(np.array(positions, np.int64) - first)
    kept_marks = [marks[position - first] for position in positions] if config.chat else None
    return Texts(
        kept_texts,
        positions,
        kept_ids if ids is not None else None,
        problems,
        size,
        fields,
        kept_marks,
    )


def _values(
    batch: Any, first: int, config: SourceConfig, name: str, unit: str
) -> tuple[list[Any], list[BadRecord]]:
    """Return every row's text, or its conversation's columns; None where it is null or cannot be
    read."""
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
        for position, value in enumerate(column, start=first):
            try:
                values.append(value.as_py())
            except UnicodeDecodeError:
                values.append(None)
                problems.append(BadRecord("invalid UTF-8", "in the text", name, position, unit))
        return values, problems


def _conversations(
    rows: Sequence[Any],
    chat: Chat | MessageContents,
    first: int,
    name: str,
    unit: str,
    problems: list[BadRecord],
) -> tuple[list[str | None], list[TextSpans]]:
    """Return conversations' texts and marks, row by row; add to `problems`."""
    texts: list[str | None] = []
    marks: list[TextSpans] = []
    for position, row in enumerate(rows, start=first):
        text, text_marks = None, TextSpans()
        try:
            if row is not None:
                text, text_marks = chat.read(_without_nulls(row))
        except ChatProblem as problem:
            problems.append(BadRecord(problem.kind, str(problem), name, position, unit))
        texts.append(text)
        marks.append(text_marks)
    return texts, marks


def _without_nulls(value: Any) -> Any:
    """Remove keys that are null: every row has all keys that some row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
