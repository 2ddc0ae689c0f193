"""Compute a step's norms by layer, for weights, gradients and updates.

    before the step: squares of weights and gradients, a copy of the weights ─► step ─► squares of
    the differences ─► sum over all ranks, in a single message with a fixed size

An element counts once, on the rank whose fragment `writes`: all layouts give the same norms. The
squares are tensors on the device, so that the host launches the step without waiting.
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
"""Norms per layer."""
CHUNK = 1 << 24
"""Elements whose squares are summed at once: on a CPU, fp64 needs a copy."""
NUMBERED = ("blocks", "shared")
"""Modules whose children count as layers."""


class LayerNorms(NamedTuple):
    """A layer's norms in a step."""

    weight: float
    """Weights before the step."""
    gradient: float
    """Gradients before clipping."""
    update: float
    """Change in the weights during the step."""


def layer_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of a model's layers, in the model's order: `embedding`, `blocks.0`, … All
    stages of a pipeline return the same names."""
    names = [name for name, _ in build_meta(config).named_parameters()]
    return tuple(dict.fromkeys(map(layer_name, names)))


def layer_name(parameter: str) -> str:
    """Return the name of the layer that holds a parameter."""
    words = parameter.split(".")
    return ".".join(words[:2]) if words[0] in NUMBERED else words[0]


class LayerSquares:
    """Squared norms by layer. Create it before the step, with the summed gradients."""

    def __init__(
        self, engine: Engine, layers: Sequence[str], gradients: Sequence[Fragment]
    ) -> None:
        self.engine = engine
        self.columns = {layer: column for column, layer in enumerate(layers)}
        shape = (KINDS, len(layers))
        self.squares = torch.zeros(shape, dtype=torch.float64, device=engine.device)
        weights = self._weights()
        self.trained = {gradient.parameter for gradient in gradients}
        self.weights_before = [
            weight.data.clone() for weight in weights if weight.parameter in self.trained
        ]
        self._add(0, weights, [weight.data for weight in weights])
        written = [gradient for gradient in gradients if gradient.writes]
        self._add(1, written, [gradient.data for gradient in written])

    def reduce_after_step(self) -> Tensor:
        """Return the squares, with those of the update, summed over all ranks [KINDS × layers].
        Collective over all ranks."""
        trained = [weight for weight in self._weights() if weight.parameter in self.trained]
        for weight, before in zip(trained, self.weights_before, strict=True):
            before.sub_(weight.data)
        self._add(2, trained, self.weights_before)
        self.weights_before.clear()
        dist.all_reduce(self.squares)
        return self.squares.view(-1)

    def _weights(self) -> list[Fragment]:
        return [weight for weight in masters(self.engine.fragments()) if weight.writes]

    def _add(self, kind: int, fragments: Sequence[Fragment], values: Sequence[Tensor]) -> None:
        """Add the squares of `values` to the layers of their fragments."""
        columns = [
            self.columns[layer_name(fragment.parameter)]
            for fragment, tensor in zip(fragments, values, strict=True)
            for _ in tensor.split(CHUNK)
        ]
        if columns:
            device = self.squares.device
            index = torch.tensor(columns).to(device, non_blocking=True)
            self.squares[kind].index_add_(0, index, sums_of_squares(values, device))


def sums_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of each chunk of each tensor in turn: fp64, on a device.

    On a GPU one launch reads all tensors, and copies none of them to fp64.
    """
    chunks = [
        chunk
        for tensor in tensors
        for chunk in (tensor.split(CHUNK) if tensor.numel() > CHUNK else (tensor,))
    ]
    squares = torch.empty(len(chunks), dtype=torch.float64, device=device)
    for place in {chunk.device for chunk in chunks}:
        numbers = [number for number, chunk in enumerate(chunks) if chunk.device == place]
        norms = torch._foreach_norm([chunks[number] for number in numbers], 2, dtype=torch.float64)
        local_squares = torch.stack(norms).square()
        if len(numbers) == len(chunks):
            return local_squares.to(device)
        squares[numbers] = local_squares.to(device)
    return squares


def norms_by_layer(layers: Sequence[str], squares: Tensor) -> dict[str, LayerNorms]:
    """Return the norms by layer from their squares [KINDS × layers] in host memory."""
    roots = squares.sqrt().view(KINDS, -1).T.tolist()
    return {layer: LayerNorms(*values) for layer, values in zip(layers, roots, strict=True)}
