from __future__ import annotations

from typing import Any

import pytest

from headrace.console.errors import LayoutError
from headrace.trainer.layout.config import LayoutConfig


def test_data_parallelism_takes_the_remaining_ranks() -> None:
    assert LayoutConfig().data_parallel(6) == 6
    assert LayoutConfig(tp=2).data_parallel(6) == 3
    assert LayoutConfig(tp=2, cp=3).data_parallel(6) == 1


@pytest.mark.parametrize("layout", [{"tp": 4}, {"cp": 4}, {"tp": 2, "cp": 4}])
def test_a_layout_must_divide_the_world_size(layout: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="does not divide 6 processes"):
        LayoutConfig(**layout).data_parallel(6)


def test_degrees_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="tp: must be at least 1"):
        LayoutConfig(tp=0)


def test_stages_take_ranks_and_name_them() -> None:
    layout = LayoutConfig(pp=2, tp=2)
    assert layout.data_parallel(8) == 2
    assert [layout.rank_name(rank, 8) for rank in (0, 3, 4)] == [
        "rank 0 (stage 0)",
        "rank 3 (stage 0)",
        "rank 4 (stage 1)",
    ]
    assert LayoutConfig(tp=2).rank_name(1, 2) == "rank 1"
    with pytest.raises(LayoutError, match=r"layout.pp=3 × layout.tp=1 .* divide 4 processes"):
        LayoutConfig(pp=3).data_parallel(4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"pp": 0}, "pp: must be at least 1"),
        ({"pp": 2, "schedule": "interleaved"}, "interleaved needs at least 2 chunks"),
        ({"pp": 2, "chunks": 2}, "interleaved needs at least 2 chunks"),
        ({"chunks": 2, "schedule": "interleaved"}, "needs at least 2 stages"),
        ({"pp": 3, "cuts": (4,)}, "need 2"),
        ({"pp": 3, "cuts": (4, 4)}, "must increase"),
        ({"pp": 2, "cuts": (0,)}, "must increase"),
        ({"pp": 3, "cuts": (4, 4), "tp": 0}, "tp: must be at least 1, not 0; cuts: must increase"),
    ],
)
def test_contradictions_are_errors(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayoutConfig(**words)
