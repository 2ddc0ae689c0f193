"""Pipeline stages: the layers of each chunk, and the modules on several stages."""

from __future__ import annotations

from ...console.errors import LayoutError
from ...models.config.config import ModelConfig, chunk_layers, chunk_users
from .config import LayoutConfig
from .cuts import Cuts, fastest_cuts

Stages = tuple[int, ...]


def choose_cuts(layout: LayoutConfig, model: ModelConfig, seq_len: int) -> Cuts:
    """Return the configured cuts, or those with the fastest simulated step. Equal on every rank."""
    if layout.cuts is not None:
        return layout.cuts
    if layout.all_chunks == 1:
        return ()
    if layout.all_chunks > len(model.layers):
        raise LayoutError(too_many_chunks(layout, model))
    from ...models.accounting.count import build_meta, flops_by_layer

    *layers, head = flops_by_layer(build_meta(model), seq_len)
    return fastest_cuts(layout.schedule, layout.pp, layout.chunks, layers, head)


def too_many_chunks(layout: LayoutConfig, model: ModelConfig) -> str:
    return (
        f"pp={layout.pp} × chunks={layout.chunks} are {layout.all_chunks} chunks, and the model "
        f"has {len(model.layers)} layers"
    )


def list_chunks(layout: LayoutConfig, stage: int) -> list[int]:
    """List a stage's chunks."""
    return list(range(stage, layout.all_chunks, layout.pp))


def shared_modules(layout: LayoutConfig, model: ModelConfig, cuts: Cuts) -> dict[str, Stages]:
    """Return the stages of each module that is on several stages, by module path."""
    chunks = chunk_layers(len(model.layers), cuts)
    stages_by_path = {
        path: tuple(sorted({chunk % layout.pp for chunk in users}))
        for path, users in chunk_users(model, chunks).items()
    }
    return {path: stages for path, stages in stages_by_path.items() if len(stages) > 1}
