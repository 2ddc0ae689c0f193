"""Layers of a model that are alike: costs are counted once for each sort."""

from __future__ import annotations

from dataclasses import replace

from ..config.config import ModelConfig
from ..config.pattern import Layer


def sorts_of(model: ModelConfig) -> tuple[list[Layer], tuple[int, ...]]:
    """Return the different layers, and the number of the sort of each layer."""
    sorts = list(dict.fromkeys(model.layers))
    numbers = {layer: number for number, layer in enumerate(sorts)}
    return sorts, tuple(numbers[layer] for layer in model.layers)


def one_of_each(model: ModelConfig) -> ModelConfig:
    """Return the model with one layer of each sort."""
    sorts, _ = sorts_of(model)
    return replace(model, pattern=f"[{', '.join(_word(layer) for layer in sorts)}]")


def _word(layer: Layer) -> str:
    before = f"{layer.shared}>" if layer.shared else ""
    after = f"{'&' if layer.parallel else '/'}{layer.mlp or 'none'}"
    return f"{before}{layer.mixer}{after}"
