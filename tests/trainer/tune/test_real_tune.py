"""`trainer tune` on this machine: a profile, a plan, real trials, and predictions of other runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.long import tune


@pytest.mark.long
def test_steps_of_layouts_and_lengths_without_trials_are_predicted(tmp_path: Path) -> None:
    """Within 15%. It takes about 6 CPU minutes, and needs a machine without much other work:
    programs beside it change the CPU time of the same step by more than that."""
    errors = tune.main(tmp_path, ranks=1)
    assert len(errors) == len(tune.HELD_OUT[1])
    assert max(map(abs, errors)) <= tune.LIMIT
