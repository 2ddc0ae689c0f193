"""Signals that some steps record on request.

    watch.layers: 100    norms, activations and router load by layer, in steps 0, 100, …
    watch.noise: 100     squared gradient norms on a small batch and on the step's batch

A watched step computes more, but its result is equal to the bit; unwatched steps compute nothing
more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...dataplane.order.timeline import PhaseRows, PlanStep
from ...models.model.layer_watch import LayerWatch
from ..engines.engine import Engine
from ..engines.layer_norms import layer_names, norms_by_layer
from ..engines.update import squared_norm, sum_copies
from ..layout.groups import Parallel
from .batches import PADDING, MicroBatch
from .execute import execute
from .step_stats import total_weight

Layers = Mapping[str, Mapping[str, float]]
"""Signals by layer and name."""


class GradientSquares(NamedTuple):
    """Squared norms of the mean gradient, on a small batch and on the step's (large) batch."""

    small_tokens: int
    small: float
    large_tokens: int
    large: float


class SmallBatch(NamedTuple):
    """The gradient on some rows of a step, over all ranks."""

    rows: int
    square: torch.Tensor
    """Squared norm, on the device."""


class MaskedBatch(NamedTuple):
    """A micro-batch in which some rows have weight 0."""

    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    cu_seqlens: torch.Tensor
    rows: Sequence[int]
    """Numbers of the rows with weight."""
    sources: Sequence[int] = ()
    digests: Sequence[bytes] = ()


@dataclass
class StepSignals:
    """A step's signals."""

    layers: Sequence[str] = ()
    """Layers whose norms the optimizer step computes; empty in unwatched steps."""
    watch: LayerWatch | None = None
    small: SmallBatch | None = None

    def vectors(self) -> list[torch.Tensor]:
        """Return sums over all ranks, on the device. Collective in a watched step."""
        vectors = []
        if self.watch is not None:
            dist.all_reduce(self.watch.sums)
            vectors.append(self.watch.sums.view(-1))
        if self.small is not None:
            vectors.append(self.small.square.view(1))
        return vectors

    def signals_by_layer(self, squares: torch.Tensor, vectors: Sequence[torch.Tensor]) -> Layers:
        """Return signals by layer, from squared norms and `vectors` in host memory."""
        if self.watch is None:
            return {}
        outputs = self.watch.outputs(vectors[0])
        return {
            layer: {
                **{f"{kind}_norm": norm for kind, norm in norms._asdict().items()},
                **(outputs[layer].entry() if layer in outputs else {}),
            }
            for layer, norms in norms_by_layer(self.layers, squares).items()
        }

    def gradient_squares(
        self, step: PlanStep[PhaseRows], squares: torch.Tensor, vectors: Sequence[torch.Tensor]
    ) -> GradientSquares | None:
        """Return both batches' squared gradient norms; None in steps that do not measure noise."""
        if self.small is None:
            return None
        length = step.phase.seq_len
        return GradientSquares(
            self.small.rows * length, float(vectors[-1]), step.rows * length, float(squares[0])
        )


class Signals:
    """Chooses the steps that record signals."""

    def __init__(
        self, engine: Engine, parallel: Parallel, layers_every: int | None, noise_every: int | None
    ) -> None:
        self.engine = engine
        self.parallel = parallel
        self.layers_every = layers_every
        self.noise_every = noise_every
        self.layers = layer_names(engine.objective.model.config) if layers_every else ()

    @contextmanager
    def collect(self, step: int, small: SmallBatch | None) -> Iterator[StepSignals]:
        """Collect signals from the forward passes inside this context."""
        if not self.layers_every or step % self.layers_every:
            yield StepSignals(small=small)
            return
        model = self.engine.objective.model
        watch = model.watch = LayerWatch(model.config, self.engine.device)
        try:
            yield StepSignals(self.layers, watch, small)
        finally:
            model.watch = None

    def small_batch(
        self, step: PlanStep[PhaseRows], batches: Sequence[MicroBatch]
    ) -> SmallBatch | None:
        """Compute the gradient on some of the step's rows, and discard it; None in steps that do
        not measure noise. Collective."""
        if not self.noise_every or step.number % self.noise_every:
            return None
        engine, parallel = self.engine, self.parallel
        small = select_small_batch(batches, parallel)
        weight = total_weight(small, parallel, engine.objective.divisor)
        execute(parallel.pipe.orders(len(small)), small, engine, parallel, weight)
        engine.objective.take_received()
        engine.objective.take_penalty(engine.device)
        if engine.objective.model.balance is not None:
            engine.objective.model.balance.take(engine.device)
        with torch.no_grad():
            gradients = engine.gradients()
            sum_copies(gradients)
            square = squared_norm(gradients, engine.device)
        engine.discard()
        rows = [row for batch in small for row in batch.rows if int(row) != PADDING]
        count = torch.tensor(len(rows) * parallel.reports_rows)
        dist.all_reduce(count, group=parallel.control)
        return SmallBatch(int(count), square)


def select_small_batch(batches: Sequence[MicroBatch], parallel: Parallel) -> Sequence[MicroBatch]:
    """Return this rank's part of the small batch: the step's first micro-batch; or half of the
    rows, if there is no other micro-batch; or the row on every second rank, if there is one row."""
    layout = parallel.pipe.layout
    min_batches = layout.pp if layout.chunks > 1 else 1  # interleaved stages need so many
    if len(batches) > min_batches:
        return batches[:min_batches]
    rows = sum(len(batch.rows) for batch in batches)
    rows_to_select = rows // 2 if rows > 1 else 1 - parallel.dp_rank % 2
    masked: list[MicroBatch] = []
    for batch in batches:
        count = min(rows_to_select, len(batch.rows))
        rows_to_select -= count
        weights = batch.weights.clone()
        weights[count * (len(batch.tokens) // len(batch.rows)) :] = 0
        numbers = list(batch.rows)[:count]
        masked.append(
            MaskedBatch(batch.tokens, batch.targets, weights, batch.cu_seqlens, numbers)  # type: ignore[arg-type]
        )
    return masked
