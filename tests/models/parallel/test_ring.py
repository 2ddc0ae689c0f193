"""Ring attention equals attention by its definition."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, product
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks.ranks import Ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headrace.models.config.options.recompute import Results, Selective
from headrace.models.documents import Documents
from headrace.models.layers.attention.ring_flash import flash, flash_backward, plan_calls
from headrace.models.layers.recompute import _contexts, recomputed
from headrace.models.parallel.axes import ALONE, Axis
from headrace.models.parallel.ring import attention
from headrace.models.parallel.ring import zigzag as zigzag_module
from headrace.models.parallel.ring.attention import FirstKeys
from headrace.models.parallel.ring.circulation import KeysAndValues
from headrace.models.parallel.ring.zigzag import TILE, Zigzag

BOUND = 1e-12
ROWS = 2


def by_definition(q: Tensor, k: Tensor, v: Tensor, past: Tensor | None) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5
    place = torch.arange(q.shape[1])
    seen = place <= place[:, None]
    if past is not None:
        seen = seen & (place >= (place - past)[..., None]).unsqueeze(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([2, 4]),
    part=st.integers(1, 11),
    kv_heads=st.sampled_from([1, 3]),
    cuts=st.none() | st.lists(st.integers(0, 1000), max_size=6),
    window=st.none() | st.integers(1, 20),
    tile=st.sampled_from([1, 3, TILE]),
)
def test_the_ring(
    pools: dict[int, Ranks],
    differs: Callable[..., float],
    size: int,
    part: int,
    kv_heads: int,
    cuts: list[int] | None,
    window: int | None,
    tile: int,
) -> None:
    length = part * size
    inputs = [normal(ROWS, length, heads, 2, seed=heads) for heads in (3, kv_heads, kv_heads)]
    past = None
    if cuts is not None or window is not None:
        edges = sorted({0, ROWS * length, *(cut % (ROWS * length) for cut in cuts or ())})
        past = Documents.build(torch.tensor(edges), (ROWS, length)).positions
        past = past if window is None else past.clamp(max=window - 1)
    sent = past.numpy() if past is not None else None
    worst = differs(
        pools[size], "ring", lambda q, k, v: by_definition(q, k, v, past), inputs, sent, tile
    )
    assert worst < BOUND


@given(
    size=st.integers(1, 4),
    part=st.integers(1, 11),
    window=st.integers(1, 50),
    tile=st.integers(1, 5),
)
def test_first_keys_of_a_window(size: int, part: int, window: int, tile: int) -> None:
    """Rows of one document need no numbers of positions."""
    past = torch.arange(part * size).unsqueeze(0).clamp(max=window - 1)
    with mock.patch.object(zigzag_module, "TILE", tile):
        for axis in Axis(None, 0, size).ranks():
            zigzag = Zigzag(part, axis)
            result = FirstKeys.build_window(window, zigzag, past.device)
            real = FirstKeys.build(past, zigzag)
            assert torch.equal(result.keys, real.keys)
            assert result.bounds == real.bounds


@settings(max_examples=30, deadline=None)
@given(
    size=st.sampled_from([2, 4]),
    part=st.integers(1, 11),
    kv_heads=st.sampled_from([1, 3]),
    cuts=st.none() | st.lists(st.integers(0, 1000), max_size=6),
)
def test_the_ring_by_flash_attention(
    pools: dict[int, Ranks],
    differs: Callable[..., float],
    size: int,
    part: int,
    kv_heads: int,
    cuts: list[int] | None,
) -> None:
    """Outputs of hops are merged by log-sum-exp; torch's flash attention of the CPU, in fp64."""
    length = part * size
    inputs = [normal(ROWS, length, heads, 2, seed=heads) for heads in (3, kv_heads, kv_heads)]
    past = edges = None
    if cuts is not None:
        edges = sorted({0, ROWS * length, *(cut % (ROWS * length) for cut in cuts)})
        past = Documents.build(torch.tensor(edges), (ROWS, length)).positions
    worst = differs(
        pools[size], "ring_flash", lambda q, k, v: by_definition(q, k, v, past), inputs, edges
    )
    assert worst < BOUND


@pytest.mark.parametrize("edges", [None, [0, 2, 9, 12, 24]])
def test_latents_travel_in_place_of_keys_and_values(
    four_ranks: Ranks, differs: Callable[..., float], edges: list[int] | None
) -> None:
    """Gradients of the latents and of the weight that expands them; hops by flash attention."""
    heads, dim, channels, length = 3, 2, 4, 12
    past = None
    if edges is not None:
        past = Documents.build(torch.tensor(edges), (ROWS, length)).positions

    def attend(q: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
        kv = (tokens @ weight.T).unflatten(-1, (2, heads, dim))
        return by_definition(q, kv[:, :, 0], kv[:, :, 1], past)

    shapes = (ROWS, length, heads, dim), (ROWS, length, channels), (2 * heads * dim, channels)
    inputs = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    divided = [True, True, False]
    worst = differs(four_ranks, "ring_flash_of_latents", attend, inputs, edges, divided=divided)
    assert worst < BOUND


def test_calls_cover_each_pair_that_is_seen_once() -> None:
    """Pairs of queries and keys of all calls on all ranks, for each set of document starts."""
    part, size = 3, 3
    seen = {(q, k) for q in range(part * size) for k in range(q + 1)}
    for inner in chain.from_iterable(combinations(range(1, part * size), n) for n in range(4)):
        starts = [0, *inner]
        document = [bisect_right(starts, token) for token in range(part * size)]
        expected = [(q, k) for q, k in sorted(seen) if document[q] == document[k]]
        ranks = [Zigzag(part, Axis(None, rank, size)) for rank in range(size)]
        places = [zigzag.index(torch.device("cpu")).tolist() for zigzag in ranks]
        result = []
        for rank, zigzag in enumerate(ranks):
            calls = plan_calls([starts], zigzag, part)
            for owner in range(size):
                for call in calls.select(owner, rank):
                    for queries, keys in zip(call.queries, call.keys, strict=True):
                        pairs = product(places[rank][slice(*queries)], places[owner][slice(*keys)])
                        result += [(q, k) for q, k in pairs if not call.causal or k <= q]
        assert sorted(result) == expected


def test_flash_attention_takes_the_calls() -> None:
    """Shapes of torch's operations on a fake GPU, with grouped queries."""
    call = plan_calls([[0], [0]], Zigzag(32, Axis(None, 0, 2)), 32).within
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = (torch.empty(64, n, 16, device="cuda", dtype=torch.bfloat16) for n in (4, 2))
        there = replace(call, ends=torch.empty(2, 5, device="cuda", dtype=torch.int32))
        y, total = flash(q, k, k, there, 0.25)
        assert (y.shape, total.shape, total.dtype) == (q.shape, (4, 64), torch.float32)
        gradients = flash_backward(y, q, k, k, y, total, there, 0.25)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, k.shape]


def test_every_rank_computes_equally_many_scores() -> None:
    """Count pairs of queries and keys that see each other."""
    part, size = 6, 4
    work = []
    for rank in range(size):
        index = Zigzag(part, Axis(None, rank, size)).index(torch.device("cpu"))
        work.append(int((index + 1).sum()))
    assert len(set(work)) == 1
    assert work[0] * size == part * size * (part * size + 1) // 2


def test_parts_are_dealt_and_collected(four_ranks: Ranks, differs: Callable[..., float]) -> None:
    for part in (1, 2, 5):
        x = normal(ROWS, 4 * part, 3, seed=1)
        weights = torch.arange(1, 4 * part + 1)[:, None]
        assert differs(four_ranks, "deal", lambda x, weights=weights: x * weights, [x]) == 0


def test_kept_attention_is_the_merged_output() -> None:
    """A rule that saves attention keeps one result of the ring, and computes no tile again."""
    zigzag = Zigzag(8, ALONE)
    x = [torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3)]
    tiles: list[int] = []

    def counted(hops: Iterator[attention.Tile]) -> Iterator[attention.Tile]:
        for tile in hops:
            tiles.append(1)
            yield tile

    def gradients(*saved: Results) -> tuple[list[Tensor], int]:
        tiles.clear()
        keep = Selective(save=saved)
        y = recomputed(attended, *x, context_fn=partial(_contexts, keep))
        return list(torch.autograd.grad(y.square().sum(), x)), len(tiles)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.ring_attention(q, KeysAndValues(k, v), None, zigzag, scale=0.5).sin()

    with mock.patch.object(attention, "around_tiles", counted):
        kept, few = gradients("attention")
        again, many = gradients("matmul")
    assert all(map(torch.equal, kept, again))
    assert (few, many) == (6, 9)  # three tiles in a pass
