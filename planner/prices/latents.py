"""Messages of latent attention over the context axis (models/operators/mla.py): queries and outputs
change ranks by heads, latents go to all ranks, and their gradients are summed there; or chunks are
exchanged, and latents travel in a ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...models.config.options.mla import MLAOptions
from ..grid.split import Split
from ..traces.trace import LayerTrace
from ..traces.work import Work
from .machine import Machine

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig


def find_latents(
    work: Work, layer: LayerTrace, model: ModelConfig, split: Split
) -> MLAOptions | None:
    """Return the attention whose operation this is, if its ranks on the context axis send
    latents."""
    if work.kind != "attention":
        return None
    for name in filter(None, (layer.operators.get("mixer"), layer.operators.get("mlp"))):
        options = model.operators[name]
        if not isinstance(options, MLAOptions):
            continue
        if work.shape[:2] == (options.head_dim, options.heads) and options.sends_latents(
            split.attention, split.tp, split.cp
        ):
            return options
    return None


class RingChannels(NamedTuple):
    """Channels of a token that a rank sends where a ring computes attention."""

    travelling: float
    """Along the ring: keys and values, or latents."""
    inputs: float
    """Into the zigzag, and out of it."""
    outputs: float


def count_ring_channels(work: Work, latents: MLAOptions | None, tp: int) -> RingChannels:
    head_width, heads, _, kv_heads = work.shape
    queries, keys_and_values = heads * head_width / tp, 2 * kv_heads * head_width / tp
    if latents is None:
        return RingChannels(keys_and_values, queries + keys_and_values, queries)
    width = latents.latent_width
    return RingChannels(width, queries + width, heads * latents.v_head_dim / tp)


def price_latents(
    machine: Machine, split: Split, options: MLAOptions, channel_bytes: float
) -> tuple[float, float]:
    """Return the seconds of both passes of an exchange; `channel_bytes` are those of a rank's
    tokens in one channel."""
    heads, reorders = options.heads / split.tp, int(split.rows > 1)
    queries = heads * options.qk_head_dim * channel_bytes
    outputs = heads * options.v_head_dim * channel_bytes
    latents = options.latent_width * channel_bytes
    shared = machine.message_copies(latents, 1) + machine.message_copies(
        split.cp * latents, reorders
    )
    for size in (queries, outputs):
        shared += machine.collective("all-to-all", size, split.cp, split.tp)
        shared += machine.message_copies(size, 1 + reorders)
    forward, backward = (
        machine.collective(name, split.cp * latents, split.cp, split.tp)
        for name in ("all-gather", "reduce-scatter")
    )
    return shared + forward, shared + backward
