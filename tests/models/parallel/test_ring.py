"""Ring attention equals attention by its definition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor

from headrace.models.documents import Documents
from headrace.models.parallel.axes import Axis
from headrace.models.parallel.ring import TILE, Zigzag

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
        past = Documents.from_cu_seqlens(torch.tensor(edges), (ROWS, length)).positions
        past = past if window is None else past.clamp(max=window - 1)
    sent = past.numpy() if past is not None else None
    worst = differs(
        pools[size], "ring", lambda q, k, v: by_definition(q, k, v, past), inputs, sent, tile
    )
    assert worst < BOUND


def test_every_rank_computes_equally_many_scores() -> None:
    """Count pairs of queries and keys that see each other."""
    part, size = 6, 4
    work = []
    for rank in range(size):
        index = Zigzag(part, Axis(None, rank, size)).index(torch.device("cpu"))
        work.append(int((index + 1).sum()))
    assert len(set(work)) == 1
    assert work[0] * size == part * size * (part * size + 1) // 2


def test_parts_are_dealt_and_collected(four: Ranks, differs: Callable[..., float]) -> None:
    for part in (1, 2, 5):
        x = normal(ROWS, 4 * part, 3, seed=1)
        weights = torch.arange(1, 4 * part + 1)[:, None]
        assert differs(four, "deal", lambda x, weights=weights: x * weights, [x]) == 0
