"""The step loop: rows in, updates out, and every step on record.

    rows of the step ─► micro-batches ─► forward, backward ─► update ─► ledger, metrics
                             all ranks ── Σ w first: the loss is divided by the whole batch's weight

It needs torch, an engine and something that yields micro-batches; nothing else is imported.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from ..console.errors import RunError
from ..dataplane.ledger import roll
from ..models.documents import Documents
from .checkpoints.saver import Saver
from .checkpoints.store import RunState
from .engines.engine import Engine, Update
from .facts import Facts, exchange
from .layout import Parallel
from .schedule import MicroBatch, PhaseView, Plan, Steps, StepView, micro_rows


@dataclass(frozen=True)
class StepRecord:
    """What one step did."""

    step: StepView
    facts: Facts
    update: Update
    lr: float
    seconds: float
    ledger: str


class Recorder(Protocol):
    """Who is told of each step; rank 0 writes, the others listen to nothing."""

    def record(self, record: StepRecord) -> None: ...

    def saved(self, step: int, blocked: float) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the loop goes about it."""

    micro_batch_tokens: int
    seed: int
    skip_not_finite: bool = False
    save_every: int = 500
    stop_after: int | None = None
    """Interrupt the run by itself after so many steps of the plan."""


class Loop:
    def __init__(
        self,
        plan: Plan,
        steps: Steps,
        lr: Callable[[int], float],
        engine: Engine,
        parallel: Parallel,
        options: Options,
        *,
        recorder: Recorder,
        saver: Saver | None = None,
        stop_asked: Callable[[], bool] = lambda: False,
        begin: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`lr` is the learning rate of a step; `begin` is told when one begins."""
        self.plan = plan
        self.steps = steps
        self.lr = lr
        self.engine = engine
        self.parallel = parallel
        self.options = options
        self.recorder = recorder
        self.saver = saver
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
            end = phase.first_step + phase.steps
            if state.step >= end:
                continue
            size = micro_rows(self.options.micro_batch_tokens, phase, self.parallel.dp)
            rows = self.steps(state.step, size)
            try:
                while state.step < end:
                    state, stop = self._step(state, rows)
                    finished = state.step == last
                    if self._should_save(state, phase, stop or finished):
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

        total = self._total_weight(batches)
        losses = torch.zeros(len(self.plan.sources), dtype=torch.float64)
        weights = torch.zeros_like(losses)
        sums = [
            self._micro_batch(batch, total, last=number == len(batches) - 1)
            for number, batch in enumerate(batches)
        ]
        for batch, by_row in zip(batches, sums, strict=True):
            sources = torch.as_tensor(list(batch.sources), dtype=torch.int64)
            losses.index_add_(0, sources, by_row.double().cpu())
            weights.index_add_(0, sources, batch.weights.sum(dim=1).double().cpu())
        facts = exchange(
            losses,
            weights,
            batches,
            data_wait=waited,
            stop=self.stop_asked(),
            save_failed=self.saver is not None and self.saver.failed,
            group=self.parallel.control,
        )
        if facts.save_failed:
            assert self.saver is not None
            self.saver.wait()
        rate = self.lr(step.number)
        update = self.engine.update(rate)
        ledger = roll(state.ledger, facts.digests)
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        self.recorder.record(StepRecord(step, facts, update, rate, seconds, ledger))
        if not update.applied and not self.options.skip_not_finite:
            raise self._not_finite(step, facts, update)
        after = replace(
            state,
            step=step.number + 1,
            row=step.first_row + step.rows,
            tokens=step.first_token + step.rows * step.phase.seq_len,
            updates=self.engine.updates,
            ledger=ledger,
        )
        return after, facts.stop or after.step == self.options.stop_after

    def _micro_batch(self, batch: MicroBatch, total: float, *, last: bool) -> torch.Tensor:
        """Adds the gradients of one micro-batch; returns Σ w·ℓ of its rows."""
        device = self.parallel.device
        tokens, targets, weights, cuts = (
            tensor.to(device, non_blocking=True)
            for tensor in (batch.tokens, batch.targets, batch.weights, batch.cu_seqlens)
        )
        documents = Documents.from_cu_seqlens(cuts, (tokens.shape[0], tokens.shape[1]))
        sums = self.engine(tokens, targets, weights, documents)
        self.engine.backward(sums.total / total, last=last)
        return sums.rows

    def _total_weight(self, batches: Sequence[MicroBatch]) -> float:
        """Σ w of the global batch, before any of it is computed on."""
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            total += batch.weights.sum(dtype=torch.float64).cpu()
        dist.all_reduce(total, group=self.parallel.control)
        return float(total) or 1.0  # a batch that is all masked has a loss of nothing

    def _should_save(self, state: RunState, phase: PhaseView, now: bool) -> bool:
        edge = state.step == phase.first_step + phase.steps
        return now or edge or state.step % self.options.save_every == 0

    def _save(self, state: RunState, *, wait: bool) -> None:
        if self.saver is None:
            return
        self.saver.save(self.engine.fragments(), state)
        if wait:
            self.saver.wait()
        self.recorder.saved(state.step, self.saver.blocked)

    def _seed(self, step: int) -> int:
        """What is random in a step is a function of the step: a resume draws the same."""
        text = f"{self.options.seed} {step} {self.parallel.rank}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")

    def _not_finite(self, step: StepView, facts: Facts, update: Update) -> RunError:
        losses = ", ".join(
            f"{source.name} {loss / weight:.4g}"
            for source, loss, weight in zip(
                self.plan.sources, facts.losses, facts.weights, strict=True
            )
            if weight
        )
        return RunError(
            f"step {step.number}: the gradients are not finite (norm {update.grad_norm}, loss "
            f"{facts.loss:.4g}); the step changed nothing",
            where=f"rows {step.first_row} to {step.first_row + step.rows - 1}, phase "
            f"{step.phase.name}; loss by source: {losses}",
            mend="`mixtures audit` shows the rows; watch.not_finite=skip goes on without the "
            "step; a lower optimizer.lr in a new run may avoid it",
        )


def _close(rows: Iterator[Sequence[MicroBatch]]) -> None:
    """End a loader's workers now, not when the garbage is collected."""
    close = getattr(rows, "close", None)
    if close is not None:
        close()
