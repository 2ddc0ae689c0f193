"""Stages of a pipeline: which layers each chunk has, and which modules several stages hold."""

from __future__ import annotations

from ...console.errors import LayoutError
from ...models.config.config import ModelConfig, chunk_layers, chunk_users
from .config import LayoutConfig
from .cuts import Cuts, fastest

Stages = tuple[int, ...]


def cuts_of(layout: LayoutConfig, model: ModelConfig, seq_len: int) -> Cuts:
    """Return the first layers of the chunks after the first: those of the configuration, or those
    of the fastest simulated step. The same on every rank."""
    if layout.cuts is not None:
        return layout.cuts
    if layout.all_chunks == 1:
        return ()
    if layout.all_chunks > len(model.layers):
        raise LayoutError(too_many_chunks(layout, model))
    from ...models.accounting.count import build_meta, flops_by_layer

    *layers, head = flops_by_layer(build_meta(model), seq_len)
    return fastest(layout.schedule, layout.pp, layout.chunks, layers, head)


def too_many_chunks(layout: LayoutConfig, model: ModelConfig) -> str:
    return (
        f"pp={layout.pp} × chunks={layout.chunks} are {layout.all_chunks} chunks, and the model "
        f"has {len(model.layers)} layers"
    )


def chunks_of(layout: LayoutConfig, stage: int) -> list[int]:
    """Return the chunks of a stage."""
    return list(range(stage, layout.all_chunks, layout.pp))


def shared_modules(layout: LayoutConfig, model: ModelConfig, cuts: Cuts) -> dict[str, Stages]:
    """Return the stages that hold each module that several stages hold, by its path."""
    chunks = chunk_layers(len(model.layers), cuts)
    stages = {
        path: tuple(sorted({chunk % layout.pp for chunk in users}))
        for path, users in chunk_users(model, chunks).items()
    }
    return {path: held for path, held in stages.items() if len(held) > 1}
