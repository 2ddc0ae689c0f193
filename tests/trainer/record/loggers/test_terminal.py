from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from headrace.trainer.loop.evaluate import Evaluation
from headrace.trainer.loop.guard import SkippedStep


def test_the_first_and_last_step_of_a_phase_are_shown(records: Any) -> None:
    run = records()
    recorder = run.open()
    for step in range(10):
        recorder.step_done(run.step(step))
    recorder.close()
    first, last = run.terminal.getvalue().splitlines()
    assert first == (
        "step 0  10.0%  synthetic  loss 3.0000  lr 1.00e-03  100 tok/s  mfu 20.0%  hfu 25.0%  "
        "data 25%  3.6s left"
    )
    assert last.startswith("step 9 100.0%") and last.endswith("done")


def test_every_step_is_shown_if_asked(records: Any) -> None:
    run = records()
    recorder = run.open(log_seconds=0)
    for step in range(10):
        recorder.step_done(run.step(step))
    assert len(run.terminal.getvalue().splitlines()) == 10


def test_a_skipped_step_is_shown_with_the_reason(records: Any) -> None:
    run = records()
    recorder = run.open()
    recorder.step_done(run.step(0))
    recorder.step_done(
        run.step(1, math.nan, skipped=SkippedStep("not finite", "rollback", back_to=0))
    )
    line = run.terminal.getvalue().splitlines()[-1]
    assert "loss not finite" in line
    assert line.endswith("skipped: not finite  back to step 0")


def test_an_evaluation_is_a_line(records: Any) -> None:
    run = records()
    recorder = run.open()
    step = run.step(4)
    stats = replace(step.stats, losses=[6.0, 9.0], weights=[3.0, 3.0], rows=[1, 1])
    recorder.evaluated(step.step, Evaluation(["web", "code"], stats, 0.5))
    assert run.terminal.getvalue() == (
        "step 4  50.0%  held out  all 2.5000  web 2.0000  code 3.0000\n"
    )
