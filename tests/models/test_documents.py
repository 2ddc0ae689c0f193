from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.console.errors import ConfigError
from headrace.models.documents import Documents, plain_layout


@st.composite
def packed(draw: st.DrawFn) -> tuple[Documents, list[int], int, int]:
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    cuts = draw(st.lists(st.integers(0, rows * length), max_size=12))
    edges = sorted([0, rows * length, *cuts])
    cu_seqlens = torch.tensor(edges, dtype=torch.int32)
    return Documents.build(cu_seqlens, (rows, length)), edges, rows, length


@settings(deadline=None)
@given(packed())
def test_positions_and_index(case: tuple[Documents, list[int], int, int]) -> None:
    documents, edges, rows, length = case
    starts = sorted({*edges[:-1], *range(0, rows * length, length)} - {rows * length})
    expected, index = [], []
    for token in range(rows * length):
        start = max(s for s in starts if s <= token)
        expected.append(token - start)
        index.append(starts.index(start))
    assert documents.positions.flatten().tolist() == expected
    assert documents.index.flatten().tolist() == index


@settings(deadline=None)
@given(packed())
def test_spans_are_the_documents(case: tuple[Documents, list[int], int, int]) -> None:
    documents, edges, rows, length = case
    ends = sorted({*edges, *range(0, rows * length, length)})
    spans = documents.spans()
    documents_and_empty = spans.ends.tolist()
    count = len(documents_and_empty) - 1
    assert documents_and_empty == ends + (count + 1 - len(ends)) * [rows * length]
    assert len(ends) - 1 <= count < 2 * (len(ends) - 1) and count.bit_count() == 1
    assert spans.ends.dtype == torch.int32
    longest = max(b - a for a, b in pairwise(ends))
    assert longest <= spans.longest < 2 * longest and spans.longest.bit_count() == 1
    assert documents.packed == (len(ends) > rows + 1)


@settings(deadline=None)
@given(packed(), st.integers(1, 9))
def test_no_chunk_holds_two_documents(
    case: tuple[Documents, list[int], int, int], chunk: int
) -> None:
    documents, _, rows, length = case
    layout = documents.aligned(chunk)
    tokens = torch.arange(rows * length).view(rows, length, 1) + 1
    spread = layout.spread(tokens)
    assert torch.equal(layout.collect(spread), tokens)
    index = torch.cat([documents.index.flatten(), torch.tensor([-1])])
    for row, continues in zip(spread.squeeze(-1), layout.continues, strict=True):
        previous = None
        for part, goes_on in zip(row, continues, strict=True):
            inside = part[part > 0] - 1
            owners = set(index[inside].tolist())
            assert len(owners) <= 1
            if owners:
                assert bool(goes_on) == (owners == previous)
                assert torch.equal(inside, torch.arange(len(inside)) + inside[0])
            previous = owners or previous


@settings(deadline=None)
@given(packed())
def test_buckets_hold_one_document_per_row(
    case: tuple[Documents, list[int], int, int],
) -> None:
    documents, _, rows, length = case
    buckets = documents.buckets()
    tokens = torch.arange(rows * length).view(rows, length) + 1
    parts = buckets.spread(tokens)
    assert torch.equal(buckets.collect(parts, rows), tokens)
    index = documents.index.flatten()
    for row in (row for part in parts for row in part):
        inside = row[row > 0] - 1
        assert len(set(index[inside].tolist())) == 1
        assert torch.equal(inside, torch.arange(len(inside)) + inside[0])
        assert (row[len(inside) :] == 0).all()
    assert sum(part.numel() for part in parts) <= 2 * rows * length
    assert documents.buckets() is buckets


@settings(deadline=None)
@given(packed())
def test_layouts_do_not_wait_for_a_device(case: tuple[Documents, list[int], int, int]) -> None:
    """The meta device has no values: reading one from it raises an error."""
    documents, _, _, length = case
    there = documents.to(torch.device("meta"))
    assert there.positions.is_meta and there.positions.shape == documents.positions.shape
    part = Documents(documents.positions[:, length // 2 :], documents).to(torch.device("meta"))
    assert part.full_rows is not None
    for on_meta, on_cpu in ((there, documents), (part.full_rows, documents)):
        there_sizes = [source.shape for source in on_meta.buckets().sources]
        assert there_sizes == [source.shape for source in on_cpu.buckets().sources]
        assert on_meta.buckets().place.is_meta
        assert on_meta.aligned(3).source.shape == on_cpu.aligned(3).source.shape


def test_a_row_may_continue_a_document() -> None:
    documents = Documents(torch.tensor([[3, 4, 0, 1, 2]]))
    layout = documents.aligned(2)
    assert layout.continues.tolist() == [[True, False, True]]
    assert documents.index.tolist() == [[0, 0, 1, 1, 1]]
    assert documents.prepend_history(2).positions.tolist() == [[1, 2, 3, 4, 0, 1, 2]]


def test_the_plain_layout_pads_the_end() -> None:
    layout = plain_layout(1, 5, 4, torch.device("cpu"))
    spread = layout.spread(torch.arange(1, 6).view(1, 5, 1))
    assert spread.flatten().tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


@pytest.mark.parametrize(
    ("ends", "shape", "words"),
    [
        ([0, 4, 13], (2, 6), "ends with 13, and 2 × 6 tokens end at 12"),
        ([0, 4], (2, 6), "ends with 4"),
        ([0, -3, 12], (2, 6), "falls at index 0: 0, -3"),
        ([0, 7, 5, 12], (2, 6), "falls at index 1: 7, 5"),
        ([-2, 12], (2, 6), "begins with -2"),
        ([0], (2, 0), "2 × 0: at least one row of one token"),
        ([], (2, 6), "one dimension of integers"),
        ([[0, 12]], (2, 6), "one dimension of integers"),
        ([0.0, 12.0], (2, 6), "float32"),
    ],
)
def test_wrong_boundaries_are_refused(ends: list[int], shape: tuple[int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        Documents.build(torch.tensor(ends), shape)
    assert raised.value.hint is not None and "from 0 to rows" in raised.value.hint
