"""Rank 0's decisions over steps without a model, killed at each moment and begun again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.console import config as reader
from headrace.console.errors import IntegrityError
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.runlog import decisions, ledger
from headrace.mixtures.audit.decisions import audit_decisions
from headrace.mixtures.mixture_file.mixture import Mixture
from headrace.mixtures.planning.open_plan import open_plan
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.steering.request import NAME, write_request
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.folders.folder import NOT_STEERED, RunFolder
from headrace.trainer.launch.records import read_decisions
from headrace.trainer.loop.mixing import pilot as pilots
from headrace.trainer.loop.mixing.decided_plan import DecidedPlan
from headrace.trainer.loop.mixing.pilot import Pilot

SAVE_EVERY = 7


class Killed(BaseException):
    """Ends a walk as a kill does: nothing is written afterwards."""


def planned(dataset: Callable[..., str], folder: Path, control: Any = None) -> Plan:
    sources = {name: {"data": dataset(name, count=60), "max_epochs": 9} for name in ("web", "code")}
    phases = {
        "main": {
            "tokens": 2560, "seq_len": 16, "batch": 64,
            "weights": {"web": 0.5, "code": 0.5}, "control": control,
        },
        "end": {"tokens": 320, "weights": {"code": 1}},
    }  # fmt: skip
    plan = resolve(reader.build(Mixture, {"sources": sources, "phases": phases}, source="a test"))
    folder.mkdir(exist_ok=True)
    plan.save(folder / decisions.PLAN)
    return plan


class Walk:
    """A run's steps: rows from the order, losses from a formula, a ledger, checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = Plan.load(folder / decisions.PLAN)
        self.saved = RunState(
            step=0, row=0, tokens=0, plan_hash=self.plan.hash, updates=0, ledger=self.plan.hash,
            seed=1,
        )  # fmt: skip
        self.rows: dict[int, list[int]] = {}
        self.hashes: dict[int, str] = {}
        self.events: list[tuple[Any, ...]] = []
        self.skipped: int | None = None

    def run(self, act: Callable[[int], None] = lambda step: None) -> None:
        """Take steps from the checkpoint on; `act` is called before each."""
        state = self.saved
        recorded = read_decisions(RunFolder(self.folder), self.plan, state)
        decided = DecidedPlan(self.plan, recorded)
        mixing = json.loads(json.dumps(state.mixing))
        pilot = Pilot(
            decided, self.folder, mixing, lambda *words, **more: self.events.append(words)
        )
        pilot.step, hashed = state.step, state.ledger
        launched = list(self.launch(decided, state.step))
        for step in range(state.step, self.plan.end_step):
            act(step)
            if step + 1 < self.plan.end_step:  # a GPU runs a step ahead
                launched += self.launch(decided, step + 1)
            sources = self.rows[step] = launched.pop(0)
            steered = pilot.decide()
            digests = b"".join(bytes([source]) * 16 for source in sources)
            row = self.plan.step(step).first_row
            hashed = self.hashes[step] = ledger.roll(hashed, decided.digest(row) + digests)
            if steered:
                decided.add(pilot.take())
            counts = np.bincount(sources, minlength=2)
            losses = [count * (3 + math.sin(step + 9 * n)) / (1 + step / 9)
                      for n, count in enumerate(counts)]  # fmt: skip
            stats = SimpleNamespace(losses=losses, weights=counts.tolist())
            pilot.observe_step(step, None if step == self.skipped else stats)  # type: ignore[arg-type]
            if (step + 1) % 4 == 0:
                held_out = SimpleNamespace(names=["web", "code"], stats=stats)
                pilot.observe_evaluation(step, held_out)  # type: ignore[arg-type]
            if (step + 1) % SAVE_EVERY == 0:
                self.saved = RunState(
                    step=step + 1, row=row, tokens=0, plan_hash=self.plan.hash, updates=0,
                    ledger=hashed, seed=1, mixing=dict(pilot.state),
                )  # fmt: skip
        self.recorded = decided.recorded

    def launch(self, decided: DecidedPlan, step: int) -> Iterator[list[int]]:
        planned = self.plan.step(step)
        rows = np.arange(planned.first_row, planned.end_row)
        yield decided.stream.locate(rows).sources.tolist()


MOMENTS = ("before the line", "after the line", "after the request", "next step", "later step")


def kill_at(moment: str, patch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Raise Killed at a moment of the next decision; return what to call at each step."""
    append, remove = decisions.append, pilots.remove_request
    count = 0

    def killing_append(*words: Any) -> None:
        nonlocal count
        count += 1
        if count == 1 and moment == "before the line":
            raise Killed
        append(*words)
        if count == 1 and moment == "after the line":
            raise Killed

    def killing_remove(*words: Any) -> None:
        remove(*words)
        if moment == "after the request":
            raise Killed

    made_at: list[int] = []

    def kill_at_moment(step: int) -> None:
        if count >= 1:
            made_at.append(step)
            if len(made_at) == {"next step": 1, "later step": 4}.get(moment):
                raise Killed

    patch.setattr(decisions, "append", killing_append)
    patch.setattr(pilots, "remove_request", killing_remove)
    return kill_at_moment


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_request_that_is_killed_at_any_moment_is_followed_once(
    dataset: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = tmp_path / "run"
    planned(dataset, folder)
    walk = Walk(folder)
    with monkeypatch.context() as patch:
        act = kill_at(moment, patch)

        def ask(step: int) -> None:
            if step == 10:
                write_request(folder, {"web": 0.125, "code": 0.875}, None)
            act(step)

        with pytest.raises(Killed):
            walk.run(ask)
    walk.run()
    [result] = decisions.read(folder / decisions.NAME, walk.plan.hash)
    assert walk.recorded == [result] and not (folder / NAME).exists()
    assert result.step == (9 if moment == "before the line" else 12)
    again = Walk(folder)  # with the decision from the start, undisturbed
    again.run()
    assert again.rows == walk.rows and again.hashes == walk.hashes
    (folder / decisions.NAME).unlink()
    without = Walk(folder)
    without.run()
    assert {s: without.rows[s] for s in range(result.step)} == {
        s: walk.rows[s] for s in range(result.step)
    }
    assert without.rows != walk.rows and without.hashes[result.step] != walk.hashes[result.step]


def test_a_decision_for_a_launched_step_would_be_another_run(
    dataset: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: one step ahead is too few where a GPU runs ahead."""
    monkeypatch.setattr(pilots, "LEAD_STEPS", 1)
    folder = tmp_path / "run"
    planned(dataset, folder)
    walk, again = Walk(folder), Walk(folder)
    walk.run(lambda step: step == 10 and write_request(folder, {"code": 1.0}, None) and None)
    again.run()
    assert again.recorded == walk.recorded and again.rows != walk.rows


CONTROLS = {
    "odm": {"kind": "odm", "every": 5, "warmup": 2, "smoothing": 0.5},
    "held-out": {
        "kind": "held-out", "stages": [{"web": 0.25, "code": 0.75}, {"web": 1}], "patience": 2,
        "min_change": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTROLS)
@pytest.mark.parametrize("moment", [m for m in MOMENTS if m != "after the request"])
def test_a_controller_that_is_killed_at_any_moment_decides_the_same(
    dataset: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    moment: str, kind: str,
) -> None:  # fmt: skip
    """To the bit, from what the checkpoint has kept; the audit repeats it."""
    plan = planned(dataset, tmp_path / "whole", CONTROLS[kind])
    (tmp_path / "killed").mkdir()
    plan.save(tmp_path / "killed" / decisions.PLAN)
    whole, killed = Walk(tmp_path / "whole"), Walk(tmp_path / "killed")
    whole.run()
    assert len(whole.recorded) == {"odm": 7, "held-out": 2}[kind]
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            killed.run(kill_at(moment, patch))
    killed.run()
    assert [item.digest for item in killed.recorded] == [item.digest for item in whole.recorded]
    assert killed.rows == whole.rows and killed.hashes == whole.hashes
    audited = list(audit_decisions(open_plan(str(tmp_path / "killed"))))
    assert len(audited) == len(whole.recorded)
    if kind == "odm":
        assert [item.why["at"] for item in whole.recorded] == [7, 12, 17, 22, 27, 32, 37]


def test_a_request_for_a_later_phase_waits_for_the_controller(
    dataset: Callable[..., str], tmp_path: Path
) -> None:
    """Decisions follow each other: one from step 41 on would end the controller's."""
    planned(dataset, tmp_path / "run", CONTROLS["odm"])
    walk = Walk(tmp_path / "run")
    walk.run(
        lambda step: write_request(walk.folder, {"code": 1.0}, 41) and None if step == 3 else None
    )
    assert [item.by for item in walk.recorded] == 7 * ["odm"] + ["hand"]
    assert walk.recorded[-1].step == 41


def test_a_skipped_step_has_no_part_in_a_decision(
    dataset: Callable[..., str], tmp_path: Path
) -> None:
    means = []
    for name, skipped in (("whole", None), ("skipped", 4)):
        folder = tmp_path / name
        planned(dataset, folder, CONTROLS["odm"])
        walk = Walk(folder)
        walk.skipped = skipped
        walk.run()
        steps = [step for step in range(7) if step != skipped]
        counts = [np.bincount(walk.rows[step], minlength=2) for step in steps]
        losses = [(3 + math.sin(step)) / (1 + step / 9) for step in steps]
        web = sum(loss * count[0] for loss, count in zip(losses, counts, strict=True))
        assert walk.recorded[0].why["losses"]["web"] == pytest.approx(web / sum(counts)[0])
        means.append(web / sum(counts)[0])
    assert means[0] != means[1]


def test_a_request_that_no_longer_fits_is_refused_and_the_run_goes_on(
    dataset: Callable[..., str], tmp_path: Path
) -> None:
    """Rows may have been served since it was checked; a file may be no request."""
    folder = tmp_path / "run"
    planned(dataset, folder)
    walk = Walk(folder)

    def ask(step: int) -> None:
        if step == 10:
            write_request(folder, {"web": 1.0}, 11)
        if step == 13:
            (folder / NAME).write_text("{}")
        if step == walk.plan.end_step - 1:
            write_request(folder, {"code": 1.0}, None)

    walk.run(ask)
    assert [words[0] for words in walk.events] == [NOT_STEERED] * 3
    assert not walk.recorded and not (folder / NAME).exists()


def test_a_checkpoint_knows_of_lost_decisions(dataset: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    planned(dataset, folder)
    walk = Walk(folder)
    walk.run(lambda step: write_request(folder, {"web": 1.0}, 20) and None if step == 3 else None)
    assert walk.saved.mixing == {"decisions": 1}
    (folder / decisions.NAME).unlink()
    with pytest.raises(IntegrityError, match="has 0 decisions, and the checkpoint of step 42"):
        walk.run()
