"""What crosses: as docs/models.md says, counted in the place of the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.models.model import Model
from headrace.models.parallel.axes import Axes, Axis

WIDTH = 16


def forward_numbers(model: Model, axis: Axis, part: int, **forms: Any) -> int:
    """Sent by one process for one row; messages to itself are none."""
    model.divide(Axes(context=axis, **forms))
    sent = 0

    def count(received: Tensor, x: Tensor, due: list[int], to: list[int], **_: Any) -> Any:
        nonlocal sent
        sent += sum(to) - to[axis.rank]
        received.zero_()
        return mock.Mock()

    with mock.patch.object(dist, "all_to_all_single", count):
        model.hidden(torch.zeros(1, part, dtype=torch.int64))
    return sent


@pytest.fixture
def one(tiny_of: Callable[..., Model]) -> Callable[..., Model]:
    def of(**options: Any) -> Model:
        return tiny_of("[x]", {"x": options})

    return of


@pytest.mark.parametrize("part", [64, 128])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_attention(one: Callable[..., Model], part: int, rank: int) -> None:
    model, axis = one(kind="attention", heads=4, kv_heads=4), Axis(None, rank, 4)
    dim = WIDTH // 4
    by_heads = forward_numbers(model, axis, part, attention="a2a")
    assert by_heads == 3 / 4 * 2 * (4 + 4) * dim * part
    ring = forward_numbers(model, axis, part, attention="ring")
    round_trip = 3 * 2 * 4 * dim * part
    assert round_trip <= ring <= round_trip + 2 * (4 + 4) * dim * part


@pytest.mark.parametrize("part", [64, 128])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_what_does_not_grow_with_the_row(one: Callable[..., Model], part: int, rank: int) -> None:
    axis, later = Axis(None, rank, 4), 3 - rank
    featurizer = 2 * 3 * WIDTH * (later > 0)
    se = one(kind="hyena-se", groups=4, taps=7)
    assert forward_numbers(se, axis, part) == featurizer + 6 * WIDTH * (later > 0)
    li = one(kind="hyena-li", state_size=4)
    assert forward_numbers(li, axis, part) == featurizer + 2 * 4 * WIDTH * later
    mamba = one(kind="mamba2", state_size=8, head_dim=8)
    inner = 2 * WIDTH
    conv = 3 * (inner + 2 * 8) * (later > 0)
    assert forward_numbers(mamba, axis, part) == conv + (8 * 8 + 1) * 4 * later


@pytest.mark.parametrize("part", [64, 128])
def test_long_filters_by_channels(one: Callable[..., Model], part: int) -> None:
    axis = Axis(None, 1, 4)
    featurizer = 2 * 3 * WIDTH
    exchanged = 3 / 4 * 2 * WIDTH * part
    freeform = one(kind="hyena-li-freeform", filter_horizon=40)
    assert forward_numbers(freeform, axis, part) == featurizer + exchanged
    modal = one(kind="hyena-li", state_size=4)
    assert forward_numbers(modal, axis, part, hyena_li="a2a") == featurizer + exchanged
