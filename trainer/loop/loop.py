"""The step loop: rows in, updates out, and every step on record.

    rows of the step ─► micro-batches ─► forward, backward ─► update ─► ledger, metrics
                             all ranks ── Σ w first: the loss is divided by the whole batch's weight

It needs torch, an engine and something that yields micro-batches; nothing else is imported.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist

from ...console.errors import RunError
from ...dataplane.order.timeline import PhaseRows, Step
from ...dataplane.runlog.ledger import roll
from ..checkpoints.policy import is_planned
from ..checkpoints.saver import Saver
from ..checkpoints.store import RunState
from ..engines.engine import Engine
from ..engines.objective import compute
from ..engines.update import Update, update
from ..layout.layout import Parallel
from .batches import MicroBatch, Plan, Steps, micro_rows
from .evaluate import Evaluation, Evaluator
from .guard import Guard, Harm
from .step_stats import Facts, exchange


@dataclass(frozen=True)
class StepRecord:
    """What one step did."""

    step: Step[PhaseRows]
    facts: Facts
    update: Update
    lr: float
    seconds: float
    ledger: str
    harm: Harm | None = None
    """Why it was not applied."""


class Recorder(Protocol):
    """Who is told of each step; rank 0 writes, the others listen to nothing."""

    def record(self, record: StepRecord) -> None: ...

    def evaluated(self, step: Step[PhaseRows], found: Evaluation) -> None: ...

    def saved(self, step: int, blocked: float) -> None: ...


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How the loop goes about it."""

    micro_batch_tokens: int
    seed: int
    guard: Guard = field(default_factory=Guard)
    save_every: int = 500
    stop_after: int | None = None
    """Interrupt the run by itself after so many steps of the plan."""


def _nowhere() -> RunState:
    raise RunError("there is no checkpoint to go back to")


class Loop:
    def __init__(
        self,
        plan: Plan,
        steps: Steps,
        lr: Callable[[int], float],
        engine: Engine,
        parallel: Parallel,
        options: LoopOptions,
        *,
        recorder: Recorder,
        saver: Saver | None = None,
        evaluator: Evaluator | None = None,
        restore: Callable[[], RunState] = _nowhere,
        stop_asked: Callable[[], bool] = lambda: False,
        begin: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`lr` is the learning rate of a step; `begin` is told when one begins; `restore` loads the
        newest checkpoint into the engine."""
        self.plan = plan
        self.steps = steps
        self.lr = lr
        self.engine = engine
        self.parallel = parallel
        self.options = options
        self.recorder = recorder
        self.saver = saver
        self.evaluator = evaluator
        self.restore = restore
        self.stop_asked = stop_asked
        self.begin = begin
        self.clock = 0.0
        """When the step before ended."""

    def run(self, state: RunState) -> tuple[RunState, bool]:
        """From `state` on. Returns where the run stands, and whether it is finished."""
        last = self.plan.last_step
        enough = self.options.stop_after
        if enough is not None and state.step >= enough:
            return state, state.step == last
        self.clock = time.perf_counter()
        for phase in self.plan.phases:
            end = phase.last_step
            if state.step >= end:
                continue
            cp = self.parallel.axes.context.size
            size = micro_rows(self.options.micro_batch_tokens, phase, self.parallel.dp, cp)
            rows = self.steps(state.step, size)
            try:
                while state.step < end:
                    state, stop = self._step(state, rows)
                    finished = state.step == last
                    self._evaluate(state, edge=state.step == end)
                    planned = is_planned(state.step, self.options.save_every, [end])
                    if planned:
                        state = replace(state, rollbacks=0)  # they are counted by checkpoint
                    if planned or stop:
                        self._save(state, wait=stop or finished)
                    if stop and not finished:
                        return state, False
            finally:
                _close(rows)
        if self.saver is not None:
            self.saver.wait()
        return state, True

    def _step(self, state: RunState, rows: Iterator[Sequence[MicroBatch]]) -> tuple[RunState, bool]:
        step = self.plan.step(state.step)
        self.begin(step.number)
        asked = time.perf_counter()
        batches = next(rows)
        waited = time.perf_counter() - asked
        torch.manual_seed(self._seed(step.number))

        facts, limit = self._gradients(batches, waited, state)
        rate = self.lr(step.number)
        result = update(self.engine, rate)
        harm = None if result.applied else self._harm(limit)
        restored = None
        if harm is not None and harm.action == "rollback":
            restored = self._roll_back(state, harm, facts)
            harm = replace(harm, back_to=restored.step)
        ledger = roll(state.ledger, facts.digests)
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        self.recorder.record(StepRecord(step, facts, result, rate, seconds, ledger, harm))
        if harm is not None and harm.action == "stop":
            raise self._stopped(harm, step, facts)
        losses = (restored or state).losses  # what is usual for the weights that go on
        if harm is None:
            losses = self.options.guard.remember(losses, facts.loss)
        after = replace(
            state,
            step=step.number + 1,
            row=step.last_row,
            tokens=step.last_token,
            updates=self.engine.updates,
            ledger=ledger,
            losses=losses,
            rollbacks=state.rollbacks + (restored is not None),
        )
        return after, facts.stop or after.step == self.options.stop_after

    def _gradients(
        self, batches: Sequence[MicroBatch], waited: float, state: RunState
    ) -> tuple[Facts, float | None]:
        """Forward and backward passes of a step. Returns what all ranks know of it, and the limit
        that its loss is above, if it is a spike: then its gradients are made not finite."""
        total = self._total_weight(batches)
        where = (self.parallel.device, self.parallel.axes.context)
        rows: list[torch.Tensor] = []
        loss = torch.zeros(())
        for batch in batches:
            if rows:
                self.engine.backward(loss / total, last=False)
            loss, by_row = compute(self.engine, batch, *where)
            rows.append(by_row)
        facts = exchange(
            batches,
            rows,
            len(self.plan.sources),
            self.parallel,
            data_wait=waited,
            stop=self.stop_asked(),
            save_failed=self.saver is not None and self.saver.failed,
        )
        if facts.save_failed:
            assert self.saver is not None
            self.saver.wait()
        guard = self.options.guard
        spike = guard.is_spike(state.losses, facts.loss)
        self.engine.backward(loss / (math.nan if spike else total), last=True)
        return facts, guard.limit(state.losses) if spike else None

    def _total_weight(self, batches: Sequence[MicroBatch]) -> float:
        """Σ w of the global batch, before any of it is computed on."""
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches if self.parallel.counted else ():
            total += batch.weights.sum(dtype=torch.float64).cpu()
        dist.all_reduce(total, group=self.parallel.control)
        return float(total) or 1.0  # a batch that is all masked has a loss of nothing

    def _evaluate(self, state: RunState, *, edge: bool) -> None:
        """After a step, and before it is saved: a resume does not come back to it."""
        if self.evaluator is None or not (edge or state.step % self.evaluator.every == 0):
            return
        self.recorder.evaluated(self.plan.step(state.step - 1), self.evaluator(self.engine))
        self.clock = time.perf_counter()  # no step has taken this time

    def _save(self, state: RunState, *, wait: bool) -> None:
        if self.saver is None:
            return
        self.saver.save(self.engine.fragments(), state)
        if wait:
            self.saver.wait()
        self.recorder.saved(state.step, self.saver.blocked)

    def _seed(self, step: int) -> int:
        """What is random in a step is a function of the step: a resume draws the same. Processes
        that have parts of one model draw alike."""
        text = f"{self.options.seed} {step} {self.parallel.data.rank}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")

    def _harm(self, limit: float | None) -> Harm:
        """Why a step was not applied, and what is to be done."""
        guard = self.options.guard
        if limit is None:
            return Harm("not finite", guard.not_finite)
        assert guard.spike != "none"
        return Harm("spike", guard.spike, limit)

    def _roll_back(self, state: RunState, harm: Harm, facts: Facts) -> RunState:
        """Take the weights of the newest checkpoint; the stream goes on."""
        if state.rollbacks >= self.options.guard.rollbacks:
            what, where = harm.told(self.plan, self.plan.step(state.step), facts)
            raise RunError(
                f"{what}; the run has gone back to its newest checkpoint {state.rollbacks} times "
                "already",
                where=where,
                hint="begin again from an earlier checkpoint with a lower optimizer.lr "
                "(--init-from), or allow more with watch.rollbacks",
            )
        if self.saver is not None:
            self.saver.wait()
        return self.restore()

    def _stopped(self, harm: Harm, step: Step[PhaseRows], facts: Facts) -> RunError:
        what, where = harm.told(self.plan, step, facts)
        key = "spike" if harm.kind == "spike" else "not_finite"
        return RunError(
            what,
            where=where,
            hint=f"`mixtures audit RUN --step {step.number}` shows the rows; watch.{key}=skip goes "
            f"on without the step, watch.{key}=rollback from the newest checkpoint's weights; a "
            "lower optimizer.lr in a new run may avoid it",
        )


def _close(rows: Iterator[Sequence[MicroBatch]]) -> None:
    """End a loader's workers now, not when the garbage is collected."""
    close = getattr(rows, "close", None)
    if close is not None:
        close()
