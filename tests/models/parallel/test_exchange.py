"""Whole rows of some channels, and all channels of a part again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from ranks import Ranks

from headrace.models.parallel.axes import ALONE, Axis
from headrace.models.parallel.exchange import everyone, exchange, own_parts, share, whole_rows


def test_there_and_back(pools: dict[int, Ranks], differs: Callable[..., float]) -> None:
    for ranks in pools.values():
        for width in (1, 4, 7):
            x = torch.randn(2, 12, width, generator=torch.Generator().manual_seed(width)).double()
            assert differs(ranks, "exchange", lambda x: x.cumsum(dim=1), [x]) < 1e-13


def test_shares_are_everything_once() -> None:
    for count in (0, 1, 5, 8):
        shares = [share(count, Axis(None, rank, 4)) for rank in range(4)]
        assert [place for mine in shares for place in range(count)[mine]] == list(range(count))
        assert max(s.stop - s.start for s in shares) - min(s.stop - s.start for s in shares) <= 1


def test_alone_nothing_is_sent_and_nothing_copied() -> None:
    x = torch.zeros(2, 3, 4)
    assert exchange([x], [x.shape], ALONE)[0] is x
    assert whole_rows([x], ALONE) is x
    assert own_parts(x, [4], ALONE).data_ptr() == x.data_ptr()
    assert torch.equal(everyone(x, ALONE), x.unsqueeze(0))
