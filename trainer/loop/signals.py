"""Signals that some steps record on request.

    watch.layers: 100    norms, activations and router load by layer, in the steps 0, 100, …
    watch.noise: 100     the gradient of a small part of the step's batch, beside that of the whole

A watched step computes more, and changes no bit of its result; other steps compute nothing more.
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
    """Squares of the norm of the mean gradient on a small batch, and on the step's."""

    small_tokens: int
    small: float
    tokens: int
    whole: float


class SmallBatch(NamedTuple):
    """The gradient of some rows of a step, over all ranks."""

    rows: int
    square: torch.Tensor
    """Square of its norm, on the device."""


class Part(NamedTuple):
    """A micro-batch of which some rows have no weight."""

    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    cu_seqlens: torch.Tensor
    rows: Sequence[int]
    """Numbers of the other rows."""
    sources: Sequence[int] = ()
    digests: Sequence[bytes] = ()


@dataclass
class StepSignals:
    """Signals of one step."""

    layers: Sequence[str] = ()
    """Layers whose norms the optimizer step computes; none in a step that does not record them."""
    watch: LayerWatch | None = None
    small: SmallBatch | None = None

    def vectors(self) -> list[torch.Tensor]:
        """Return the sums of all ranks, on the device. Collective in a watched step."""
        found = []
        if self.watch is not None:
            dist.all_reduce(self.watch.sums)
            found.append(self.watch.sums.view(-1))
        if self.small is not None:
            found.append(self.small.square.view(1))
        return found

    def layers_of(self, squares: torch.Tensor, vectors: Sequence[torch.Tensor]) -> Layers:
        """Return the signals by layer, from the squares of norms and the vectors in host memory."""
        if self.watch is None:
            return {}
        outputs = self.watch.outputs(vectors[0])
        return {
            layer: {
                **{f"{kind}_norm": norm for kind, norm in own._asdict().items()},
                **(outputs[layer].entry() if layer in outputs else {}),
            }
            for layer, own in norms_by_layer(self.layers, squares).items()
        }

    def noise_of(
        self, step: PlanStep[PhaseRows], squares: torch.Tensor, vectors: Sequence[torch.Tensor]
    ) -> GradientSquares | None:
        """Return the squares of both batches' gradients."""
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
    def of(self, step: int, small: SmallBatch | None) -> Iterator[StepSignals]:
        """Collect the signals of a step's forward passes, inside of this context."""
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
        """Compute the gradient of a part of the step's rows, and discard it; None in a step that
        does not measure noise. Collective."""
        if not self.noise_every or step.number % self.noise_every:
            return None
        engine, parallel = self.engine, self.parallel
        part = part_of(batches, parallel)
        weight = total_weight(part, parallel, engine.objective.divisor)
        execute(parallel.pipe.orders(len(part)), part, engine, parallel, weight)
        engine.objective.take_received()
        engine.objective.take_penalty(engine.device)
        with torch.no_grad():
            gradients = engine.gradients()
            sum_copies(gradients)
            square = squared_norm(gradients, engine.device)
        engine.discard()
        rows = [number for each in part for number in each.rows if int(number) != PADDING]
        count = torch.tensor(len(rows) * parallel.reports_rows)
        dist.all_reduce(count, group=parallel.control)
        return SmallBatch(int(count), square)


def part_of(batches: Sequence[MicroBatch], parallel: Parallel) -> Sequence[MicroBatch]:
    """Return this rank's micro-batches of the small batch: the first of the step; or, if there is
    no other, those with half of their rows; or, if there is one row, those of every other rank."""
    layout = parallel.pipe.layout
    least = layout.pp if layout.chunks > 1 else 1  # interleaved stages need so many
    if len(batches) > least:
        return batches[:least]
    rows = sum(len(batch.tokens) for batch in batches)
    kept = rows // 2 if rows > 1 else 1 - parallel.dp_rank % 2
    found: list[MicroBatch] = []
    for batch in batches:
        own = min(kept, len(batch.tokens))
        kept -= own
        weights = batch.weights.clone()
        weights[own:] = 0
        numbers = list(batch.rows)[:own]
        found.append(Part(batch.tokens, batch.targets, weights, batch.cu_seqlens, numbers))  # type: ignore[arg-type]
    return found
