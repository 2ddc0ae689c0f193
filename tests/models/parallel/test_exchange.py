"""From all channels of parts to some channels of whole rows, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.ranks.ranks import Ranks

from headrace.models.parallel.axes import ALONE, Axis
from headrace.models.parallel.exchange import exchange, gather_rows, scatter_rows


def test_there_and_back(pools: dict[int, Ranks], differs: Callable[..., float]) -> None:
    for ranks in pools.values():
        for width in (1, 4, 7):
            x = torch.randn(2, 12, width, generator=torch.Generator().manual_seed(width)).double()
            assert differs(ranks, "exchange", lambda x: x.cumsum(dim=1), [x]) < 1e-13


def test_the_ranks_parts_cover_everything_once() -> None:
    for count in (0, 1, 5, 8):
        parts = [rank.part(count) for rank in Axis(None, 2, 4).ranks()]
        assert [place for part in parts for place in range(count)[part]] == list(range(count))
        assert parts[2] == Axis(None, 2, 4).part(count)


def test_one_rank_sends_and_copies_nothing() -> None:
    x = torch.zeros(2, 3, 4)
    assert exchange([x], [x.shape], ALONE)[0] is x
    assert gather_rows(x, [4], ALONE) is x
    assert scatter_rows(x, [4], ALONE).data_ptr() == x.data_ptr()
