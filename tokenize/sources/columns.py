"""Rows of Arrow batches as documents: what Parquet and Arrow share."""

from __future__ import annotations

from typing import Any

from . import LARGEST_DOCUMENT, Problem, SourceConfig, Texts


def texts_of(
    batch: Any, first: int, config: SourceConfig, name: str, unit: str, size: int
) -> Texts:
    """The texts of a batch, whose first row has position `first`."""
    import pyarrow as pa

    column = batch.column(config.text_field)
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    strings = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(test(kind) for test in strings):
        what = f"column `{config.text_field}` holds {kind}, not text"
        return Texts([], [], None, [Problem("other schema", what, name, first, unit)], size)
    problems = []
    try:
        texts: list[str | None] = column.to_pylist()
    except UnicodeDecodeError:
        texts = []
        for number, value in enumerate(column, start=first):
            try:
                texts.append(value.as_py())
            except UnicodeDecodeError:
                texts.append(None)
                problems.append(Problem("invalid UTF-8", "invalid UTF-8", name, number, unit))
    ids = batch.column(config.id_field).to_pylist() if config.id_field else None
    bad = {problem.position for problem in problems}
    kept, positions, own = [], [], []
    for number, text in enumerate(texts, start=first):
        if text is None:
            if number not in bad:
                what = f"column `{config.text_field}` is null"
                problems.append(Problem("missing field", what, name, number, unit))
        elif len(text) > LARGEST_DOCUMENT and not config.split_large:
            what = f"a document of more than {LARGEST_DOCUMENT >> 20} MiB"
            problems.append(Problem("too large", what, name, number, unit))
        else:
            kept.append(text)
            positions.append(number)
            if ids is not None:
                id = ids[number - first]
                own.append(None if id is None else str(id))
    return Texts(kept, positions, own if ids is not None else None, problems, size)
