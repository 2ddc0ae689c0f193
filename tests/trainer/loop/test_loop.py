from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.small_loops import PLAN, Kept, begin, make, saving, steps

from headrace.console.errors import RunError, StorageError
from headrace.dataplane.runlog import writer as lines
from headrace.trainer.checkpoints import store, tensors
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.layout.schedules import SCHEDULES, Orders, StageAction
from headrace.trainer.loop import loop as loops
from headrace.trainer.loop.batches import micro_batches, micro_rows
from headrace.trainer.loop.guard import Guard
from headrace.trainer.loop.hooks.hook import Hook, StepRecord
from headrace.trainer.loop.hooks.stop_signal import StopSignal
from headrace.trainer.loop.loop import Loop, LoopOptions


@dataclass
class Order(Hook):
    """The order of launches and reads."""

    events: list[str] = field(default_factory=list)

    def step_begins(self, step: int) -> None:
        self.events.append(f"launch {step}")

    def step_done(self, record: StepRecord) -> None:
        self.events.append(f"read {record.step.number}")


@dataclass
class Checkpoints:
    """Checkpoints that are in no file."""

    restore: Callable[[], RunState]
    failed: bool = False

    def save(self, fragments: Any, state: RunState) -> None: ...

    def wait(self) -> None: ...

    def poll(self) -> None: ...


def test_the_loop_takes_every_step_once(parallel: Parallel) -> None:
    loop, kept = make(parallel)
    state, finished = loop.run(begin())
    assert finished and [r.step.number for r in kept.records] == [0, 1, 2, 3]
    assert (state.step, state.row, state.tokens, state.updates) == (4, 24, 24 * 16, 4)
    assert state.ledger == kept.records[-1].ledger


def test_micro_batch_size_changes_nothing(parallel: Parallel) -> None:
    """Micro-batches of one row, and all rows with padding, give the same losses and rows."""
    row_by_row, all_at_once = (
        make(parallel, micro_batch_tokens=16),
        make(parallel, micro_batch_tokens=999),
    )
    states = [loop.run(begin())[0] for loop, _ in (row_by_row, all_at_once)]
    assert states[0].ledger == states[1].ledger
    for a, b in zip(row_by_row[1].records, all_at_once[1].records, strict=True):
        assert a.stats.loss == pytest.approx(b.stats.loss, abs=2e-6)
        assert a.update.grad_norm == pytest.approx(b.update.grad_norm, rel=2e-5)


def in_turn(micro_batches: int) -> Orders:
    return SCHEDULES["1f1b"].orders(1, 1, micro_batches)


def all_forward_first(micro_batches: int) -> Orders:
    return SCHEDULES["gpipe"].orders(1, 1, micro_batches)


def without_a_backward_pass(micro_batches: int) -> Orders:
    [order] = in_turn(micro_batches)
    return [[action for action in order if action != StageAction("backward", 0, 0)]]


def test_a_schedule_decides_the_order_alone(parallel: Parallel) -> None:
    """A schedule that leaves a backward pass out has another norm (negative control)."""
    norms = []
    for orders in (in_turn, all_forward_first, without_a_backward_pass):
        loop, kept = make(parallel, stop_after=1)
        loop.orders = orders
        loop.run(begin())
        norms.append(kept.records[0].update.grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=2e-5)
    assert norms[2] != pytest.approx(norms[0], rel=1e-2)


def test_the_loop_stops_when_asked_and_resumes(parallel: Parallel) -> None:
    whole = make(parallel)[0].run(begin())[0]
    loop, _ = make(parallel, stop_after=2)
    state, finished = loop.run(begin())
    assert not finished and state.step == 2
    after, kept = make(parallel)
    state, finished = after.run(state)
    assert finished and state.ledger == whole.ledger
    assert [record.step.number for record in kept.records] == [2, 3]


@dataclass
class Poisoned:
    """Rows of one step whose loss is NaN."""

    batch: Any

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.batch, name)
        return value * math.nan if name == "weights" else value


def poisoned(step: int, rows: int) -> Iterator[Sequence[Any]]:
    for number, batches in enumerate(steps(step, rows), start=step):
        yield [Poisoned(batch) for batch in batches] if number == 1 else batches


def test_a_step_that_is_not_finite_stops_the_run_unchanged(parallel: Parallel) -> None:
    loop, kept = make(parallel, steps=poisoned)
    with pytest.raises(RunError, match="step 1: the gradients are not finite") as caught:
        loop.run(begin())
    assert "rows 6 to 11" in str(caught.value)
    assert not kept.records[-1].update.applied
    for fragment in loop.engine.fragments():
        assert torch.isfinite(fragment.data).all()


def test_a_step_that_is_not_finite_may_be_skipped(parallel: Parallel) -> None:
    loop, kept = make(parallel, steps=poisoned, guard=Guard(not_finite="skip"))
    state, finished = loop.run(begin())
    assert finished and state.updates == 3
    assert [record.update.applied for record in kept.records] == [True, False, True, True]


def spiking(step: int, rows: int) -> Iterator[Sequence[Any]]:
    """The same tokens at every step, which the model memorises, and other tokens at step 2."""
    for number, batches in enumerate(steps(step, rows), start=step):
        tokens = next(steps(2 if number == 2 else 0, rows))
        yield [replace(a, rows=b.rows) for a, b in zip(tokens, batches, strict=True)]  # type: ignore[type-var]


def everything(loop: Loop) -> dict[str, torch.Tensor]:
    return {f.key: f.data.clone() for f in loop.engine.fragments()}


LEARNS_BY_HEART = {"spike": "skip", "spike_bound": 0.0, "spike_window": 8}


def test_a_spike_is_skipped(parallel: Parallel) -> None:
    loop, kept = make(parallel, steps=spiking, guard=Guard(**LEARNS_BY_HEART))
    state, finished = loop.run(begin())
    assert finished and state.updates == 3
    assert [record.update.applied for record in kept.records] == [True, True, False, True]
    skipped = kept.records[2].skipped
    assert skipped is not None and (skipped.kind, skipped.action) == ("spike", "skip")
    assert state.losses == tuple(kept.records[n].stats.loss for n in (0, 1, 3))
    without, _ = make(parallel, steps=spiking)
    assert without.run(begin())[0].ledger == state.ledger, "the rows were seen all the same"
    loop, _ = make(parallel, steps=spiking, guard=Guard(**LEARNS_BY_HEART | {"spike": "stop"}))
    with pytest.raises(RunError, match=r"step 2: the loss is .*, a spike above") as caught:
        loop.run(begin())
    assert "rows 12 to 17" in str(caught.value)


def test_a_spike_that_is_applied_records_all_of_its_documents(
    parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "MAX_PIECES", 2)
    guard = Guard(spike_bound=0.0, spike_window=8)
    loop, kept = make(parallel, steps=spiking, guard=guard, records_documents=True)
    loop.run(begin())
    assert all(record.update.applied for record in kept.records)
    assert [len(record.stats.pieces) for record in kept.records[:3]] == [2, 2, 6]


def test_a_spike_rolls_back_weights_and_never_the_row(parallel: Parallel) -> None:
    guard = Guard(**LEARNS_BY_HEART | {"spike": "rollback"})
    loop, kept = make(parallel, steps=spiking, guard=guard, stop_after=3)
    at_first, first = everything(loop), replace(begin(), losses=(3.7,))

    def restore() -> RunState:
        fill(loop.engine.fragments(), at_first)
        loop.engine.loaded(first.updates)
        return first

    def fill(fragments: Any, tensors: dict[str, torch.Tensor]) -> None:
        for fragment in fragments:
            fragment.data.copy_(tensors[fragment.key])

    loop.checkpoints = Checkpoints(restore)
    state, _ = loop.run(first)
    assert (state.step, state.row, state.updates, state.rollbacks) == (3, 18, 0, 1)
    assert state.losses == (3.7,), "what was usual there"
    assert kept.records[2].skipped is not None and kept.records[2].skipped.back_to == 0
    for key, tensor in everything(loop).items():
        assert torch.equal(tensor, at_first[key]), key
    never, _ = make(parallel, steps=spiking, guard=replace(guard, rollbacks=0))
    with pytest.raises(
        RunError, match="has already rolled back to its newest checkpoint 0 times"
    ) as caught:
        never.run(begin())
    assert "rows 12 to 17" in str(caught.value)


def test_a_skipped_step_records_all_documents(
    parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other steps record the largest, here two; the record changes no bit of the run."""
    monkeypatch.setattr(loops, "MAX_PIECES", 2)
    guard = Guard(**LEARNS_BY_HEART | {"spike": "skip"})
    options = {"steps": spiking, "guard": guard, "stop_after": 3}
    (loop, kept), (plain, plain_keeper) = (
        make(parallel, **options, records_documents=on) for on in (True, False)
    )
    state = replace(begin(), losses=(3.7,))
    assert loop.run(state) == plain.run(state)
    for ours, theirs in zip(kept.records, plain_keeper.records, strict=True):
        assert ours.stats.losses == theirs.stats.losses and not theirs.stats.pieces
        assert len(ours.stats.pieces) == (2 if ours.skipped is None else 6)
    spike = kept.records[2].stats
    assert sorted(piece.row for piece in spike.pieces) == list(range(12, 18))
    assert sum(piece.loss for piece in spike.pieces) == pytest.approx(sum(spike.losses), rel=1e-6)
    assert sum(piece.weight for piece in spike.pieces) == sum(spike.weights)


AHEAD = ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3"]


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, AHEAD),
        ({"steps": poisoned, "guard": Guard(not_finite="skip")}, AHEAD),
        ({"stop_after": 3}, ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]),
        # A checkpoint holds the weights after its step: step 2 is launched after the save.
        ({"save_every": 2}, [*AHEAD[:3], "read 1", "launch 2", "launch 3", "read 2", "read 3"]),
    ],
)
def test_running_ahead_changes_the_order_of_launches_and_reads_alone(
    parallel: Parallel, options: dict[str, Any], order: list[str]
) -> None:
    def run(*, ahead: bool) -> tuple[list[str], Loop, Kept, RunState]:
        loop, kept = make(parallel, **options)
        loop.runs_ahead = ahead
        loop.hooks.hooks.append(watched := Order())
        return watched.events, loop, kept, loop.run(begin())[0]

    events, loop, kept, state = run(ahead=True)
    assert events == order
    in_turn, plain_engine, expected, expected_state = run(ahead=False)
    assert [event.split()[0] for event in in_turn] == ["launch", "read"] * len(kept.records)
    assert state == expected_state
    for a, b in zip(kept.records, expected.records, strict=True):  # as text, NaN equals NaN
        assert str((a.stats.losses, a.update, a.lr, a.ledger)) == str(
            (b.stats.losses, b.update, b.lr, b.ledger)
        )
    for key, tensor in everything(loop).items():
        assert torch.equal(tensor, everything(plain_engine)[key]), key


def test_layers_are_recorded_on_request_and_change_nothing(parallel: Parallel) -> None:
    plain, without = make(parallel)
    assert plain.run(begin())[1] and all(not record.layers for record in without.records)
    for ahead in (False, True):
        loop, kept = make(parallel, layers_every=3)
        loop.runs_ahead = ahead
        loop.run(begin())
        assert [bool(record.layers) for record in kept.records] == [True, False, False, True]
        for a, b in zip(kept.records, without.records, strict=True):
            assert (a.stats.losses, a.update) == (b.stats.losses, b.update)
        for key, tensor in everything(loop).items():
            assert torch.equal(tensor, everything(plain)[key]), key


def test_a_step_that_is_not_applied_has_no_update(parallel: Parallel) -> None:
    loop, kept = make(parallel, steps=poisoned, guard=Guard(not_finite="skip"), layers_every=1)
    loop.run(begin())
    [skipped] = [record for record in kept.records if record.skipped is not None]
    layers = skipped.layers.values()
    assert all(layer["update_norm"] == 0 and layer["weight_norm"] > 0 for layer in layers)
    assert any(math.isnan(layer["gradient_norm"]) for layer in layers)


def test_a_stop_ends_the_run_after_the_step_that_was_launched_ahead(parallel: Parallel) -> None:
    loop, kept = make(parallel)
    loop.runs_ahead = True
    loop.hooks.hooks.append(StopSignal(lambda: True))
    state, finished = loop.run(begin())
    assert not finished and state.step == 2
    assert [record.step.number for record in kept.records] == [0, 1]


def test_a_step_ahead_of_one_that_is_not_finite_is_lost_with_the_run(parallel: Parallel) -> None:
    loop, kept = make(parallel, steps=poisoned)
    loop.runs_ahead = True
    with pytest.raises(RunError, match="step 1: the gradients are not finite"):
        loop.run(begin())
    assert [record.step.number for record in kept.records] == [0, 1]


def test_a_guard_that_needs_the_result_reads_each_step_first(parallel: Parallel) -> None:
    loop, _ = make(parallel)
    device = replace(parallel, device=torch.device("cuda"))

    def runs_ahead(guard: Guard) -> bool:
        options = LoopOptions(micro_batch_tokens=32, seed=1, guard=guard)
        arguments = (PLAN, steps, lambda step: 1e-2, loop.engine, device, options)
        return Loop(*arguments).runs_ahead

    assert runs_ahead(Guard()) and runs_ahead(Guard(not_finite="skip"))
    assert not runs_ahead(Guard(not_finite="rollback")) and not runs_ahead(Guard(spike="skip"))
    assert not loop.runs_ahead, "on the CPU there is nothing to wait for"


def test_batch_arithmetic() -> None:
    (phase,) = PLAN.phases
    assert (micro_rows(999, phase, 1), micro_batches(6, phase, 1)) == (6, 1)
    assert (micro_rows(64, phase, 1), micro_batches(3, phase, 1)) == (3, 2)  # even, not 4 and 2
    assert (micro_rows(1, phase, 1), micro_batches(1, phase, 1)) == (1, 6)
    assert (micro_rows(999, phase, 4), micro_batches(2, phase, 4)) == (2, 1)


def test_ledger_and_metrics_are_durable_before_a_checkpoint_is_sealed(
    tmp_path: Path, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    durable: dict[str, int] = {}
    fsync, commit = os.fsync, store.commit
    sealed: list[int] = []

    def sync(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        durable[place.name] = os.fstat(descriptor).st_size
        if place == folder.root:
            durable.update((f"name of {item.name}", 1) for item in place.iterdir())
        fsync(descriptor)

    def seal(path: Path, target: Path, files: Any, state: Any, texts: Any) -> None:
        for file in (folder.ledger, folder.metrics):
            text = file.read_bytes()[: durable[file.name]]
            assert text.count(b"\n") >= state.step, file
            assert f"name of {file.name}" in durable
        sealed.append(state.step)
        commit(path, target, files, state, texts)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(store, "commit", seal)
    saving(folder, parallel).run(begin())
    assert sealed == [1, 2, 3, 4]


def test_an_event_says_whether_a_checkpoint_was_sealed_or_its_save_failed(
    tmp_path: Path, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    write, saves = tensors.write, []

    def fails_at_the_second(*arguments: Any) -> Any:
        saves.append(1)
        if len(saves) == 2:
            raise StorageError("the disk is full")
        return write(*arguments)

    monkeypatch.setattr(tensors, "write", fails_at_the_second)
    with pytest.raises(StorageError, match="the disk is full"):
        saving(folder, parallel).run(begin())
    events = [(event["event"], event["step"]) for event in lines.read(folder.events)]
    assert events == [("checkpoint", 1), ("checkpoint failed", 2)]
    assert [store.parse_step(path) for path in store.committed(folder.checkpoints)] == [1]
