"""Norms by layer of one step: of the weights, their gradients and their update.

    before the step: squares of weights and gradients, a copy of the weights ─► step ─► squares of
    the differences ─► sum over all ranks, in one message of a fixed size

Each element counts once, on the rank whose fragment `writes`: every layout gives the same norms.
The squares are tensors on the device, so that the host launches the step without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...models.accounting.count import build_meta
from ...models.config.config import ModelConfig
from ..checkpoints.fragments import Fragment, masters
from .engine import Engine

KINDS = 3
"""Norms of a layer."""
CHUNK = 1 << 24
"""Elements whose squares are summed at once: fp64 makes a copy of them."""
NUMBERED = ("blocks", "shared")
"""Modules whose children are layers of their own."""


class LayerNorm(NamedTuple):
    """Norms of one layer in one step."""

    weight: float
    """Norm of the weights before the step."""
    gradient: float
    """Norm of the gradients before clipping."""
    update: float
    """Norm of the change of the weights in the step."""


def layers_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of a model's layers, in the order of the model: `embedding`, `blocks.0`, …
    The stages of a pipeline have the same names."""
    names = [name for name, _ in build_meta(config).named_parameters()]
    return tuple(dict.fromkeys(map(layer_of, names)))


def layer_of(parameter: str) -> str:
    """Return the name of the layer that holds a parameter."""
    words = parameter.split(".")
    return ".".join(words[:2]) if words[0] in NUMBERED else words[0]


class LayerSquares:
    """Squares of the norms in a step. Create it before the step, with the summed gradients."""

    def __init__(
        self, engine: Engine, layers: Sequence[str], gradients: Sequence[Fragment]
    ) -> None:
        self.engine = engine
        self.places = {layer: place for place, layer in enumerate(layers)}
        size = (KINDS, len(layers))
        self.squares = torch.zeros(size, dtype=torch.float64, device=engine.device)
        weights = self._weights()
        self.trained = {each.parameter for each in gradients}
        self.before = [each.data.clone() for each in weights if each.parameter in self.trained]
        for each in weights:
            self._add(0, each, each.data)
        for each in gradients:
            if each.writes:
                self._add(1, each, each.data)

    def after(self) -> Tensor:
        """Return the squares after the step, summed over all ranks: [KINDS × layers]. Collective
        over all ranks."""
        trained = [each for each in self._weights() if each.parameter in self.trained]
        for each, before in zip(trained, self.before, strict=True):
            self._add(2, each, before.sub_(each.data))
        self.before.clear()
        dist.all_reduce(self.squares)
        return self.squares.view(-1)

    def _weights(self) -> list[Fragment]:
        return [each for each in masters(self.engine.fragments()) if each.writes]

    def _add(self, kind: int, fragment: Fragment, values: Tensor) -> None:
        total = self.squares[kind, self.places[layer_of(fragment.parameter)]]
        for chunk in values.split(CHUNK):
            total += squared(chunk).to(total.device)


def squared(values: Tensor) -> Tensor:
    """Return the sum of the squares, fp64."""
    square: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    return square


def norms(layers: Sequence[str], squares: Tensor) -> dict[str, LayerNorm]:
    """Return the norms by layer, from their squares in host memory."""
    roots = squares.sqrt().view(KINDS, -1).T.tolist()
    return {layer: LayerNorm(*own) for layer, own in zip(layers, roots, strict=True)}
