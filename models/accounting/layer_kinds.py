"""Layer kinds: equal layers cost the same, so each kind is counted once."""

from __future__ import annotations

from dataclasses import replace

from ..config.config import ModelConfig
from ..config.pattern import Layer


def find_layer_kinds(model: ModelConfig) -> tuple[list[Layer], tuple[int, ...]]:
    """Return the distinct layers, and every layer's kind as an index into them."""
    kinds = list(dict.fromkeys(model.layers))
    indices = {layer: index for index, layer in enumerate(kinds)}
    return kinds, tuple(indices[layer] for layer in model.layers)


def reduce_to_kinds(model: ModelConfig) -> ModelConfig:
    """Return the model with a single layer per kind."""
    kinds, _ = find_layer_kinds(model)
    return replace(model, pattern=f"[{', '.join(_format_layer(layer) for layer in kinds)}]")


def _format_layer(layer: Layer) -> str:
    call = f"{layer.shared}>" if layer.shared else ""
    mlp = f"{'&' if layer.parallel else '/'}{layer.mlp or 'none'}"
    return f"{call}{'|'.join(layer.mixers)}{mlp}"
