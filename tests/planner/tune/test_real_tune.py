"""`trainer tune` on this machine: a profile, a plan, real trials, and predictions of other runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.long import tune


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", tune.HELD_OUT)
def test_steps_of_layouts_and_lengths_without_trials_are_predicted(
    tmp_path: Path, ranks: int
) -> None:
    """Within 15%. It takes about 10 CPU minutes, 20 with two ranks, and needs a machine without
    much other work: programs beside it change the CPU time of the same step by more than that."""
    errors = tune.main(tmp_path, ranks)
    assert len(errors) == len(tune.HELD_OUT[ranks])
    assert max(map(abs, errors)) <= tune.LIMIT
