"""Signals that some steps record on request: norms, activations and router load by layer.

    watch.layers: 100    in the steps 0, 100, …

A watched step computes more, and changes no bit of its result; other steps compute nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...models.layer_watch import LayerWatch
from ..engines.engine import Engine
from ..engines.layer_norms import layers_of, norms

Layers = Mapping[str, Mapping[str, float]]
"""Signals by layer and name."""


@dataclass
class StepSignals:
    """Signals of one step."""

    layers: Sequence[str] = ()
    """Layers whose norms the optimizer step computes; none in a step that is not watched."""
    watch: LayerWatch | None = None

    def vectors(self) -> list[torch.Tensor]:
        """Return the sums of all ranks, on the device. Collective in a watched step."""
        if self.watch is None:
            return []
        dist.all_reduce(self.watch.sums)
        return [self.watch.sums.view(-1)]

    def read(self, squares: torch.Tensor, vectors: Sequence[torch.Tensor]) -> Layers:
        """Return the signals by layer, from the squares of norms and the vectors in host memory."""
        if self.watch is None:
            return {}
        [sums] = vectors
        outputs = self.watch.outputs(sums)
        return {
            layer: {
                **{f"{kind}_norm": norm for kind, norm in own._asdict().items()},
                **(outputs[layer].entry() if layer in outputs else {}),
            }
            for layer, own in norms(self.layers, squares).items()
        }


class Signals:
    """Chooses the steps that record signals."""

    def __init__(self, engine: Engine, layers_every: int | None) -> None:
        self.engine = engine
        self.every = layers_every
        self.layers = layers_of(engine.objective.model.config) if layers_every else ()

    @contextmanager
    def of(self, step: int) -> Iterator[StepSignals]:
        """Collect the signals of a step's forward passes, inside of this context."""
        if not self.every or step % self.every:
            yield StepSignals()
            return
        model = self.engine.objective.model
        watch = model.watch = LayerWatch(model.config, self.engine.device)
        try:
            yield StepSignals(self.layers, watch)
        finally:
            model.watch = None
