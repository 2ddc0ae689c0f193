from __future__ import annotations

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
    with pytest.raises(ValueError, match="tp must be at least 1"):
        LayoutConfig(tp=0)
