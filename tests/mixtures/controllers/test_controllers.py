"""Controllers beside their formulas, written again from the paper and from the page."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.console.errors import PlanError
from headrace.mixtures.controllers import load_controller
from headrace.mixtures.controllers.controller import Observed

NAMES = "abcd"


def odm(alpha: float, shares: np.ndarray, turns: list[np.ndarray]) -> list[np.ndarray]:
    """Return the shares after each turn of losses; NaN for a source that gave no rows."""
    count, rewards, decided = len(shares), np.zeros(len(shares)), []
    for turn, losses in enumerate(turns, 1):
        seen = ~np.isnan(losses)
        rewards[seen] = alpha * rewards[seen] + (1 - alpha) * losses[seen] / shares[seen]
        rate = min(1 / count, math.sqrt(math.log(count) / (count * turn)))
        before = turn - 1
        rate_before = min(1 / count, math.sqrt(math.log(count) / (count * before)) if before else 1)
        scores = np.exp(rate_before * rewards)
        shares = (1 - count * rate) * scores / scores.sum() + rate
        decided.append(shares)
    return decided


@given(
    alpha=st.sampled_from([0.0, 0.5, 0.9]),
    turns=st.lists(st.lists(st.floats(0.01, 12), min_size=4, max_size=4), min_size=1, max_size=9),
    hidden=st.integers(0, 4),
)
def test_online_data_mixing_follows_the_paper(
    alpha: float, turns: list[list[float]], hidden: int
) -> None:
    controller = load_controller({"kind": "odm", "every": 10, "smoothing": alpha})
    first = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}
    columns = [np.array(losses) for losses in turns]
    for losses in columns:
        losses[hidden:] = np.nan
    shares, state = first, dict[str, Any]()
    for losses, expected in zip(columns, odm(alpha, np.array(list(first.values())), columns),
                                strict=True):  # fmt: skip
        seen = {n: float(x) for n, x in zip(NAMES, losses, strict=True) if not np.isnan(x)}
        shares, state = controller.decide(shares, Observed(losses=seen, held_out=[]), state)
        assert list(shares.values()) == pytest.approx(expected.tolist(), rel=1e-9)
        assert sum(shares.values()) == pytest.approx(1)
    bounds = controller.bounds(first, 10 * len(turns) + 1)
    for name, share in shares.items():
        low, high = bounds[name]
        assert low - 1e-12 <= share <= high + 1e-12


def test_turns_come_at_equal_intervals_after_the_warm_up() -> None:
    controller = load_controller({"kind": "odm", "every": 10, "warmup": 5})
    nothing = Observed(losses={}, held_out=[])
    assert [n for n in range(40) if controller.is_due(n, nothing, {})] == [15, 25, 35]
    assert controller.bounds({"a": 0.8, "b": 0.2}, 15) == {"a": (0.8, 0.8), "b": (0.2, 0.2)}


@pytest.mark.parametrize(
    ("losses", "due"),
    [
        ([], False),
        ([3.0, 2.0, 1.0], False),
        ([3.0, 2.0, 2.0], False),
        ([3.0, 2.0, 2.0, 1.95], True),
        ([3.0, 2.0, 2.0, 1.85], False),
        ([3.0, 3.1, 3.2], True),
    ],
)
def test_a_stage_ends_where_the_held_out_loss_stalls(losses: list[float], due: bool) -> None:
    stages = [{"a": 0.5, "b": 0.5}, {"b": 1}]
    controller = load_controller({"kind": "held-out", "stages": stages, "min_change": 0.1})
    observed = Observed(losses={}, held_out=losses)
    assert controller.is_due(7, observed, {}) == due
    assert not controller.is_due(7, observed, {"stage": 2})
    shares, state = controller.decide({"a": 0.9, "b": 0.1}, observed, {"stage": 1})
    assert (shares, state) == ({"a": 0.0, "b": 1}, {"stage": 2})
    assert controller.bounds({"a": 0.9, "b": 0.1}, 99) == {"a": (0.0, 0.9), "b": (0.1, 1)}


def test_wrong_settings_are_named() -> None:
    def keys(**settings: Any) -> list[str]:
        return [key for key, _ in load_controller(settings).problems()]

    assert keys(kind="odm", every=0, warmup=-1, smoothing=1) == ["every", "warmup", "smoothing"]
    assert keys(kind="held-out", stages=[], patience=0, min_change=-1) == [
        "stages", "patience", "min_change"
    ]  # fmt: skip
    assert keys(kind="held-out", stages=[{"a": 0.5}, {"a": 2, "b": -1}]) == ["stages", "stages"]
    odm, stages = (
        load_controller({"kind": kind, **more})
        for kind, more in (("odm", {}), ("held-out", {"stages": [{"a": 0.5, "x": 0.5}]}))
    )
    assert [key for key, _ in odm.source_problems(["a"])] == [""]
    assert [key for key, _ in stages.source_problems(["a", "b"])] == ["stages"]
    with pytest.raises(PlanError, match="does not have"):
        load_controller({"kind": "other"})
