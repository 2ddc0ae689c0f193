"""Predictions of published runs by the planner, each without the run itself."""

from __future__ import annotations

import pytest

from benchmarks.published_runs import (
    PublishedLayout,
    groups,
    leave_group_out,
    leave_one_out,
    mean,
    priced,
    refusal,
    runs,
)


def test_three_published_runs_are_near_with_the_figures_of_the_others() -> None:
    """Negative control: the shipped rate and bytes that move once."""
    layouts = [PublishedLayout(run) for run in groups()["fms-fsdp README, 96 H100, 800 Gb/s"]]
    assert len(layouts) == 3
    fitted = [layout.step(650e12, 4) / layout.run.seconds - 1 for layout in layouts]
    assert max(map(abs, fitted)) < 0.1
    shipped = [layout.step(792e12, 1) / layout.run.seconds - 1 for layout in layouts]
    assert max(shipped) < -0.2


@pytest.mark.long
def test_published_runs_are_predicted_within_eight_percent() -> None:
    predictions = leave_one_out()
    assert len(predictions) == len([*priced()]) == 19
    assert len(runs()) == 39 and len({refusal(run) for run in runs()}) == 3
    error, constant = (
        mean(getattr(e, name) for e in predictions) for name in ("error", "constant")
    )
    assert error < 0.08 < 1.5 * error < constant
    assert max(abs(each.error) for each in predictions) < 0.25
    assert mean(each.error for each in leave_group_out()) < 0.15
