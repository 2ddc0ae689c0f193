"""Places of lists in Arrow files and streams, beside pyarrow's own reading."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.console.errors import InputError, IntegrityError
from headrace.dataplane.shards import arrow

LISTS = st.lists(st.lists(st.integers(0, 60_000), max_size=5), max_size=8)


def written(batches: list[Any], *, stream: bool) -> bytes:
    out = io.BytesIO()
    schema = pa.schema([("tokens", batches[0].type), ("note", pa.string_view())])
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, schema) as writer:
        for tokens in batches:
            notes = pa.array(["a note that is too long for a view"] * len(tokens), pa.string_view())
            writer.write_batch(pa.record_batch([tokens, notes], schema=schema))
    return out.getvalue()


def documents_of(data: bytes) -> list[list[int]]:
    """Read the documents of a file by its layout."""
    layout = arrow.FORMAT.layout(
        lambda a, b: data[a:b], len(data), dtype="uint16", details={"column": "tokens"}
    )
    runs = zip(np.diff(layout.run_tokens).tolist(), layout.run_bytes.tolist(), strict=True)
    parts = [np.frombuffer(data, np.uint16, count, at) for count, at in runs]
    tokens = np.concatenate([np.empty(0, np.uint16), *parts]).tolist()
    starts = layout.document_starts.tolist()
    return [tokens[a:b] for a, b in itertools.pairwise(starts)]


@settings(deadline=None, max_examples=50)
@given(batches=st.lists(LISTS, min_size=1, max_size=3), stream=st.booleans())
@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
def test_lists_are_found(kind: Any, batches: list[list[list[int]]], stream: bool) -> None:
    arrays = [pa.array(rows, kind(pa.uint16())) for rows in batches]
    assert documents_of(written(arrays, stream=stream)) == [row for rows in batches for row in rows]


@settings(deadline=None, max_examples=50)
@given(
    places=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=8),
    stream=st.booleans(),
)
def test_views_in_any_order(places: list[tuple[int, int]], stream: bool) -> None:
    """Lists of views may overlap, and stand in any order."""
    values = pa.array(range(30), pa.uint16())
    offsets = pa.array([at for at, _ in places], pa.int32())
    sizes = pa.array([size for _, size in places], pa.int32())
    array = pa.ListViewArray.from_arrays(offsets, sizes, values)
    assert documents_of(written([array, array], stream=stream)) == array.to_pylist() * 2


def test_lists_of_a_fixed_size() -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    array = pa.array(rows, pa.list_(pa.uint16(), 3))
    assert documents_of(written([array, array[1:]], stream=False)) == [*rows, rows[1]]


@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.list_view(pa.uint16())], ids=str)
def test_null_lists_and_ids_are_refused(kind: Any) -> None:
    for rows in ([[1], None], [[1, None]]):
        with pytest.raises(InputError, match="nulls among its ids"):
            documents_of(written([pa.array(rows, kind)], stream=False))


def test_a_stream_that_is_cut_anywhere_is_refused() -> None:
    data = written([pa.array([[1, 2], [3]], pa.list_(pa.uint16()))] * 2, stream=True)
    assert documents_of(data) == [[1, 2], [3]] * 2
    for size in range(4, len(data), 4):
        with pytest.raises(IntegrityError, match="not a whole Arrow IPC stream"):
            documents_of(data[:size])
