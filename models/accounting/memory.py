"""A rank's local shards, and memory in generation. step.py has the memory of a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ...console.errors import LayoutError
from ..config.config import ModelConfig
from ..config.options.precision import Precision
from ..config.precision import compute_dtype
from ..operators import BatchContext, State
from ..parallel.axes import Axes, Axis
from .count import build_meta
from .state import Degrees, Shards


def rank_shards(
    config: ModelConfig,
    degrees: Degrees,
    rank: int,
    cuts: Sequence[int] = (),
    local_chunks: Collection[int] = (0,),
) -> Shards:
    """Return a local shard per parameter for a rank on the tensor axis; with `cuts`, for the
    pipeline stage that holds `local_chunks`."""
    tp, ep = degrees.tp, degrees.ep
    num_ranks = degrees.dp * degrees.cp * tp
    if problems := [*config.tp_problems(tp), *config.ep_problems(ep, tp, num_ranks)]:
        layout = f"tp={tp}" if ep == 1 else f"tp={tp}, ep={ep}"
        raise LayoutError("\n  ".join([f"{layout} does not divide this model", *problems]))
    model = build_meta(config)
    model.keep(cuts, local_chunks)
    # Every rank of the expert axis has the same number of experts.
    model.shard(Axes(tensor=Axis(None, rank, tp), experts=Axis(None, rank, ep)))
    return model.local_shards


def generation_bytes(config: ModelConfig, seq_len: int, *, precision: Precision) -> int:
    """Count a sequence's bytes in generation: constant states, and caches that grow with it."""
    model = build_meta(config).to(compute_dtype(precision))
    with torch.device("meta"):
        u = torch.empty(1, 1, config.width, dtype=compute_dtype(precision))
        positions = torch.zeros(1, 1, dtype=torch.int64)
        total = 0
        for layer, block in zip(config.layers, model.typed_blocks(), strict=True):
            batch = BatchContext(positions, embeddings=u)
            states = []
            shared = model.shared_block(layer)
            if block.call is not None:
                states.append(State(seq_len))
                block.call(shared, u, batch.call_context(states[-1]))
            for operator in block.operators():
                if not operator.options.tokenwise:
                    states.append(State(seq_len))
                    operator(u, BatchContext(positions, state=states[-1]))
            total += sum(tensor.nbytes for state in states for tensor in state.tensors.values())
    return total
