"""The halo holds the positions before a part, from however many parts they come."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks.ranks import Ranks
from torch import Tensor
from torch.nn import functional as F

from headrace.models.parallel.axes import ALONE
from headrace.models.parallel.halo import receive_halo


@settings(max_examples=20, deadline=None)
@given(size=st.sampled_from([2, 4]), part=st.integers(1, 6), count=st.integers(0, 30))
def test_the_halo(
    pools: dict[int, Ranks], differs: Callable[..., float], size: int, part: int, count: int
) -> None:
    x = torch.randn(2, part * size, 3, generator=torch.Generator().manual_seed(count)).double()

    def whole(x: Tensor) -> Tensor:
        padded = F.pad(x.sin(), (0, 0, count, 0))
        weights = torch.arange(1, count + 1)[:, None]
        halos = [
            (padded[:, first : first + count] * weights).sum(dim=1, keepdim=True)
            for first in range(0, part * size, part)
        ]
        return x + torch.cat(halos, dim=1).repeat_interleave(part, dim=1)

    assert differs(pools[size], "halo", whole, [x], count) < 1e-13


def test_the_halo_of_whole_rows_is_zero() -> None:
    assert torch.equal(
        receive_halo(torch.ones(1, 4, 2), 3, ALONE, local_length=4), torch.zeros(1, 3, 2)
    )
