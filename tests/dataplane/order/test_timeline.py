from __future__ import annotations

import pytest

from headrace.dataplane.order.plan import Plan


def test_steps_cover_the_rows_without_gaps(two_phases: Plan) -> None:
    row, token = two_phases.first_row, 0
    for number in range(two_phases.first_step, two_phases.end_step):
        step = two_phases.step(number)
        assert (step.first_row, step.first_token) == (row, token)
        assert two_phases.step_at(row) == step == two_phases.step_at(row + step.rows - 1)
        assert two_phases.phase_at(row) is step.phase
        assert step.phase.first_row <= row < step.phase.end_row
        assert step.phase.first_step <= number < step.phase.end_step
        row, token = row + step.rows, token + step.rows * step.phase.seq_len
    assert row == two_phases.end_row
    assert token == two_phases.tokens
    for outside in (-1, two_phases.end_step):
        with pytest.raises(IndexError):
            two_phases.step(outside)
