"""The step loop: read rows, run forward and backward passes, step the optimizer, record the step.

    rows of the step ─► micro-batches ─► schedule: forward, backward ─► optimizer step ─► record
                             Σ w over all ranks first: the loss is divided by the global weight

The host launches a step, then reads norm and losses. On a GPU it launches the next step before it
reads, unless something between the two steps needs the result: a checkpoint, an evaluation, a guard
that may roll back.

The loop imports torch alone, and works with any engine and any source of micro-batches.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from ...console.errors import RunError
from ...dataplane.order.timeline import PhaseRows, PlanStep
from ...dataplane.runlog.ledger import roll
from ..checkpoints.keeping import Checkpoints
from ..checkpoints.policy import is_planned
from ..checkpoints.store import RunState
from ..engines.engine import Engine
from ..engines.update import conclude, launch
from ..layout.groups import Parallel
from .batches import MicroBatch, Mixing, RunPlan, Steps, micro_rows
from .compute_time import Lap, start_timer
from .documents.largest import MAX_PIECES, gather_pieces
from .evaluate import Evaluator
from .execute import execute
from .guard import Guard, SkippedStep, SpikeDetector
from .hooks.attribution import ENGINE
from .hooks.hook import Hook, Hooks, StepRecord
from .signals import Signals, StepSignals
from .step_stats import PIECES, StepStats, Transfer, gather, step_loss, total_weight

if TYPE_CHECKING:
    from .documents.piece_losses import StepPieces


@dataclass(frozen=True)
class Launched:
    """A step that the device runs."""

    step: PlanStep[PhaseRows]
    batches: Sequence[MicroBatch]
    results: Transfer
    """The z-loss, the signals, the squared norms (global, then by layer), losses by piece, and
    losses by row for each micro-batch."""
    pieces: StepPieces | None
    """None if losses of documents are not recorded."""
    signals: StepSignals
    received: Sequence[int]
    """Rows that this rank's experts received, by layer."""
    lr: float
    data_wait: float
    """Seconds that this rank waited for rows."""
    lap: Lap | None
    """This rank's compute time, if ranks are timed."""


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Settings of the loop."""

    micro_batch_tokens: int
    seed: int
    guard: Guard = field(default_factory=Guard)
    save_every: int = 500
    layers_every: int | None = None
    """Interval in steps between signals by layer; None: never."""
    noise_every: int | None = None
    """Interval in steps between measurements of gradient noise; None: never."""
    records_documents: bool = False
    """True if the largest losses of documents are recorded."""
    times_ranks: bool = False
    """True if ranks measure their compute time."""
    stop_after: int | None = None
    """Interrupt the run after this step of the plan."""


class Loop:
    def __init__(
        self,
        plan: RunPlan,
        steps: Steps,
        lr: Callable[[int], float],
        engine: Engine,
        parallel: Parallel,
        options: LoopOptions,
        *,
        hooks: Sequence[Hook] = (),
        checkpoints: Checkpoints | None = None,
        evaluator: Evaluator | None = None,
        mixing: Mixing | None = None,
    ) -> None:
        """`lr` maps steps to learning rates."""
        self.plan = plan
        self.steps = steps
        self.lr = lr
        self.engine = engine
        self.parallel = parallel
        self.options = options
        self.hooks = Hooks(hooks)
        self.orders = parallel.pipe.orders
        self.checkpoints = checkpoints
        self.evaluator = evaluator
        self.mixing = mixing
        guard = options.guard
        self.runs_ahead = parallel.device.type == "cuda" and not (
            guard.needs_loss or guard.may_roll_back
        )
        """True if a step is launched before the previous one is read."""
        self.signals = Signals(engine, parallel, options.layers_every, options.noise_every)
        self.clock = 0.0
        """Time at which the previous step ended."""
        self.compute_timer = start_timer(parallel.device) if options.times_ranks else None
        self.spikes = SpikeDetector(guard)

    def run(self, state: RunState) -> tuple[RunState, bool]:
        """Train from `state`. Return the new state, and True if the plan is finished."""
        last = self.plan.end_step
        stop_after = self.options.stop_after
        if stop_after is not None and state.step >= stop_after:
            return state, state.step == last
        self.clock = time.perf_counter()
        with self.compute_timer or nullcontext():
            return self._phases(state)

    def _phases(self, state: RunState) -> tuple[RunState, bool]:
        last = self.plan.end_step
        for phase in self.plan.phases:
            end = phase.end_step
            if state.step >= end:
                continue
            cp = self.parallel.axes.context.size
            size = micro_rows(self.options.micro_batch_tokens, phase, self.parallel.dp, cp)
            rows = self.steps(state.step, size)
            try:
                state, stop = self._phase(state, end, rows)
            finally:
                _close(rows)
            if stop and state.step < last:
                return state, False
        if self.checkpoints is not None:
            self.checkpoints.wait()
        return state, True

    def _phase(
        self, state: RunState, end: int, rows: Iterator[Sequence[MicroBatch]]
    ) -> tuple[RunState, bool]:
        """Train up to step `end`. Return the new state, and True if the run must stop."""
        stop = False
        ahead: Launched | None = None
        while state.step < end:
            launched = ahead or self._launch(state.step, state, rows)
            next_step = state.step + 1
            launches_next = self.runs_ahead and not stop and not self._is_due(next_step, end)
            ahead = self._launch(next_step, state, rows) if launches_next else None
            state, stop_requested = self._conclude(state, launched)
            stop = stop or stop_requested
            if self.checkpoints is not None:
                self.checkpoints.poll()
            if ahead is not None:
                continue
            self._evaluate(state, edge=state.step == end)
            planned = is_planned(state.step, self.options.save_every, [end])
            if planned:
                state = replace(state, rollbacks=0)  # rollbacks are counted per checkpoint
            if planned or stop:
                self._save(state, wait=stop or state.step == self.plan.end_step)
            if planned and not stop:
                self.hooks.saved(state.step)
                self.clock = time.perf_counter()
            if stop:
                break
        return state, stop

    def _is_due(self, step: int, end: int) -> bool:
        """Return True if the loop saves, evaluates or ends before `step` begins."""
        evaluates = self.evaluator is not None and step % self.evaluator.every == 0
        saves = is_planned(step, self.options.save_every, [end])
        return evaluates or saves or step in (end, self.options.stop_after)

    def _launch(
        self, number: int, state: RunState, rows: Iterator[Sequence[MicroBatch]]
    ) -> Launched:
        """Launch passes and optimizer step. `state` is from the latest step that was read."""
        step = self.plan.step(number)
        self.hooks.step_begins(number)
        began = time.perf_counter()
        batches = next(rows)
        data_wait = time.perf_counter() - began
        small = self.signals.small_batch(step, batches)
        torch.manual_seed(self._seed(number))
        with self.signals.collect(number, small) as signals:
            losses, pieces = self._gradients(batches)
        objective = self.engine.objective
        received, penalty = objective.take_received(), objective.take_penalty(self.engine.device)
        rate = self.lr(number)
        spike = self._is_spike(batches, losses, state)
        with record_function(ENGINE):
            update = launch(self.engine, rate, signals.layers, discard=spike)
        sums = torch.zeros(0, device=self.engine.device) if pieces is None else pieces.sums
        results = Transfer([penalty, *signals.vectors(), update, sums, *losses])
        lap = self.compute_timer.lap() if self.compute_timer is not None else None
        return Launched(step, batches, results, pieces, signals, received, rate, data_wait, lap)

    def _conclude(self, state: RunState, launched: Launched) -> tuple[RunState, bool]:
        """Read and record a step. Return the state after it, and True if the run must stop."""
        step = launched.step
        numbers, losses = launched.results.wait(), len(launched.batches)
        penalty, *vectors, squares, sums = numbers[:-losses]
        result = conclude(self.engine, float(squares[0]))
        layers = launched.signals.signals_by_layer(squares[1:], vectors)
        noise = launched.signals.gradient_squares(step, squares, vectors)
        stats = self._gather(launched, numbers[-losses:], sums, float(penalty))
        skipped = None if result.applied else self._skipped(state, stats)
        if launched.pieces is not None and (skipped or self.spikes.detect(stats.loss)):
            pieces = gather_pieces(launched.pieces.losses(sums), self.parallel)
            stats = replace(stats, pieces=pieces)
        restored = None
        if skipped is not None and skipped.action == "rollback":
            restored = self._roll_back(state, skipped, stats)
            skipped = replace(skipped, back_to=restored.step)
        decision = b"" if self.mixing is None else self.mixing.digest(step.first_row)
        ledger = roll(state.ledger, decision + stats.digests)
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        record = StepRecord(
            step,
            stats,
            result,
            launched.lr,
            seconds,
            ledger,
            skipped,
            layers,
            noise,
            decision.hex(),
        )
        self.hooks.step_done(record)
        if skipped is not None and skipped.action == "stop":
            raise self._stopped(skipped, step, stats)
        recent = (restored or state).losses  # of the weights that the run keeps
        if skipped is None:
            recent = self.options.guard.remember(recent, stats.loss)
        after = replace(
            state,
            step=step.number + 1,
            row=step.end_row,
            tokens=step.end_token,
            updates=self.engine.updates,
            ledger=ledger,
            losses=recent,
            rollbacks=state.rollbacks + (restored is not None),
        )
        return after, stats.stop or after.step == self.options.stop_after

    def _gradients(
        self, batches: Sequence[MicroBatch]
    ) -> tuple[list[torch.Tensor], StepPieces | None]:
        """Run a step's forward and backward passes. Return losses by row for each micro-batch, and
        by piece."""
        engine, parallel = self.engine, self.parallel
        divisor = engine.objective.divisor
        weight = total_weight(batches, parallel, divisor)
        orders = self.orders(len(batches))
        if not self.options.records_documents:
            return execute(orders, batches, engine, parallel, weight), None
        from .documents.piece_losses import StepPieces  # needs numpy, which synthetic rows do not

        token_losses: list[torch.Tensor] = []
        losses = execute(orders, batches, engine, parallel, weight, token_losses)
        return losses, StepPieces.sum(batches, token_losses, parallel, divisor)

    def _is_spike(
        self, batches: Sequence[MicroBatch], losses: Sequence[torch.Tensor], state: RunState
    ) -> bool:
        """Return True if the step's loss is a spike. Before the optimizer step, only the ranks that
        compute the loss know it; later, all ranks reach the same verdict from the statistics."""
        guard, parallel = self.options.guard, self.parallel
        if not (guard.needs_loss and parallel.pipe.computes_loss):
            return False
        divisor = self.engine.objective.divisor
        loss = step_loss(batches, losses, len(self.plan.sources), parallel, divisor)
        return guard.is_spike(state.losses, loss)

    def _gather(
        self,
        launched: Launched,
        losses: Sequence[torch.Tensor],
        sums: torch.Tensor,
        penalty: float,
    ) -> StepStats:
        step = launched.step
        pieces = launched.pieces if self.parallel.reports_rows else None
        measured: dict[str, Any] = {
            "z_loss": penalty,
            "data_wait": launched.data_wait,
            "expert_load": launched.received,
            "save_failed": self.checkpoints is not None and self.checkpoints.failed,
            **({} if launched.lap is None else {"own_seconds": launched.lap.seconds()}),
            **({} if pieces is None else {PIECES: pieces.losses(sums, MAX_PIECES)}),
            **self.hooks.measure(),
        }
        stats = gather(
            launched.batches,
            losses,
            len(self.plan.sources),
            range(step.first_row, step.end_row),
            self.parallel,
            self.engine.objective.divisor,
            measured,
        )
        if stats.save_failed:
            assert self.checkpoints is not None
            self.checkpoints.wait()  # raises the error of the failed save
        return stats

    def _evaluate(self, state: RunState, *, edge: bool) -> None:
        """Evaluate if due. The step is saved afterwards, so a resume does not evaluate again."""
        if self.evaluator is None or not (edge or state.step % self.evaluator.every == 0):
            return
        self.hooks.evaluated(self.plan.step(state.step - 1), self.evaluator(self.engine))
        self.clock = time.perf_counter()  # evaluation is not part of a step's time
        if self.compute_timer is not None:
            self.compute_timer.restart()

    def _save(self, state: RunState, *, wait: bool) -> None:
        if self.checkpoints is None:
            return
        self.hooks.save_begins()  # a checkpoint is never newer than the ledger on disk
        if self.mixing is not None:
            state = replace(state, mixing=dict(self.mixing.state))
        self.checkpoints.save(self.engine.fragments(), state)
        if wait:
            self.checkpoints.wait()

    def _seed(self, step: int) -> int:
        """Return a step's random seed: a resume draws the same numbers, and ranks that shard a
        model replica draw equal numbers."""
        words = f"{self.options.seed} {step} {self.parallel.data.rank}"
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest(), "little")

    def _skipped(self, state: RunState, stats: StepStats) -> SkippedStep:
        """Return why a step was not applied, and the configured action."""
        guard = self.options.guard
        if not guard.is_spike(state.losses, stats.loss):
            return SkippedStep("not finite", guard.not_finite)
        assert guard.spike != "none"
        return SkippedStep("spike", guard.spike, guard.limit(state.losses))

    def _roll_back(self, state: RunState, skipped: SkippedStep, stats: StepStats) -> RunState:
        """Restore the newest checkpoint's weights; the stream continues."""
        if state.rollbacks >= self.options.guard.rollbacks:
            problem, where = skipped.message(self.plan, self.plan.step(state.step), stats)
            raise RunError(
                f"{problem}; the run has already rolled back to its newest checkpoint "
                f"{state.rollbacks} times",
                where=where,
                hint="start again from an earlier checkpoint with a lower optimizer.lr "
                "(--init-from), or allow more with watch.rollbacks",
            )
        if self.checkpoints is None:
            raise RunError("there is no checkpoint to roll back to")
        self.checkpoints.wait()
        return self.checkpoints.restore()

    def _stopped(
        self, skipped: SkippedStep, step: PlanStep[PhaseRows], stats: StepStats
    ) -> RunError:
        problem, where = skipped.message(self.plan, step, stats)
        key = "spike" if skipped.kind == "spike" else "not_finite"
        return RunError(
            problem,
            where=where,
            hint=f"`mixtures audit RUN --step {step.number}` shows the rows; watch.{key}=skip "
            f"continues without the step, watch.{key}=rollback from the newest checkpoint's "
            "weights; a lower optimizer.lr in a new run may avoid it",
        )


def _close(rows: Iterator[Sequence[MicroBatch]]) -> None:
    """Stop the loader's workers now, not at garbage collection."""
    close = getattr(rows, "close", None)
    if close is not None:
        close()
