"""Memory of one rank: training state, activations, and the states of generation.

Nothing is allocated. The state follows from what the engine lists (state.py). Activations are
measured: one layer of each sort runs on fake tensors, and every storage that autograd keeps is
counted once. That is what the plain operators need; fused kernels need less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...console.errors import LayoutError
from ..config import ModelConfig
from ..layers.recompute import Recompute
from ..loss import cross_entropy
from ..model import Model
from ..operators import BatchContext, State
from ..parallel.axes import Axes, Axis
from ..precision import Precision
from .count import build_meta
from .state import Degrees, Shards

LONGEST = 4096
"""Tokens of the longest row that runs; activations of longer rows are extrapolated."""


def rank_shards(
    config: ModelConfig,
    degrees: Degrees,
    rank: int,
    cuts: Sequence[int] = (),
    own: Collection[int] = (0,),
) -> Shards:
    """Return the local shard of each parameter on a rank of the tensor axis; with `cuts`, on the
    stage of a pipeline that holds the chunks `own`."""
    tp, ep = degrees.tp, degrees.ep
    ranks = degrees.dp * degrees.cp * tp
    if wrong := [*config.tp_problems(tp), *config.ep_problems(ep, tp, ranks)]:
        what = f"tp={tp}" if ep == 1 else f"tp={tp}, ep={ep}"
        raise LayoutError("\n  ".join([f"{what} does not divide this model", *wrong]))
    model = build_meta(config)
    model.keep(cuts, own)
    # All ranks of the experts' axis have equally many experts.
    model.shard(Axes(tensor=Axis(None, rank, tp), experts=Axis(None, rank, ep)))
    return model.local_shards


def activation_memory(
    config: ModelConfig, seq_len: int, *, rows: int, precision: Precision, degrees: Degrees
) -> dict[str, Any]:
    """Return the bytes that a micro-batch keeps for its backward pass: the activations by mode of
    recompute, and the logits."""
    kept = kept_by_layer(config, seq_len, rows=rows, precision=precision)
    ranks = degrees.tp * degrees.cp
    return {
        "activations": {
            mode: round((sum(sizes) + max(kept.recomputed[mode])) / ranks)
            for mode, sizes in kept.layers.items()
        },
        "logits": round(kept.logits / ranks),
    }


@dataclass(frozen=True)
class Kept:
    """Bytes that a micro-batch keeps for its backward pass, over all ranks that share its rows."""

    layers: Mapping[Recompute, Sequence[int]]
    """Kept by each layer from its forward to its backward pass, by mode of recompute."""
    recomputed: Mapping[Recompute, Sequence[int]]
    """Kept by each layer while its backward pass runs."""
    logits: int


def kept_by_layer(config: ModelConfig, seq_len: int, *, rows: int, precision: Precision) -> Kept:
    measured, logits = activations(config, seq_len, rows=rows, precision=precision)
    stream = rows * seq_len * config.width * precision.weight_bytes
    calls = [len(layer.branches) + (layer.shared is not None) for layer in config.layers]
    layers: dict[Recompute, list[int]] = {
        "none": measured,
        "operator": [stream * count for count in calls],
        "block": [stream for _ in calls],
    }
    nothing = [0 for _ in calls]
    return Kept(layers, {"none": nothing, "operator": measured, "block": measured}, logits)


def activations(
    config: ModelConfig, seq_len: int, *, rows: int, precision: Precision
) -> tuple[list[int], int]:
    """Return the bytes kept for the backward pass: of each layer, and of the logits and the loss.

    They grow with the length and, where there is a mask, with its square: for long rows they are
    extrapolated from three shorter ones.
    """
    if seq_len <= LONGEST:
        return measured(config, seq_len, rows=rows, precision=precision)
    lengths = (LONGEST // 4, LONGEST // 2, LONGEST)
    samples = [measured(config, n, rows=rows, precision=precision) for n in lengths]
    layers = zip(*(kept for kept, _ in samples), strict=True)
    kept = [extrapolated(lengths, sizes, seq_len) for sizes in layers]
    return kept, extrapolated(lengths, tuple(logits for _, logits in samples), seq_len)


def extrapolated(lengths: tuple[int, ...], sizes: tuple[int, ...], length: int) -> int:
    """Return the value at `length` of the polynomial through all points."""
    total = Fraction(0)
    for n, size in zip(lengths, sizes, strict=True):
        term = Fraction(size)
        for other in lengths:
            if other != n:
                term *= Fraction(length - other, n - other)
        total += term
    return round(total)


def measured(
    config: ModelConfig, seq_len: int, *, rows: int, precision: Precision
) -> tuple[list[int], int]:
    standard = torch.get_default_dtype()
    torch.set_default_dtype(precision.compute)
    try:
        with FakeTensorMode():
            model = Model(config)
            u = torch.empty(rows, seq_len, config.width, requires_grad=True)
            batch = BatchContext(torch.arange(seq_len).unsqueeze(0), embeddings=u)
            sorts: dict[str, int] = {}
            kept = []
            for layer, block in zip(config.layers, model.typed_blocks(), strict=True):
                sort = repr(layer)
                if sort not in sorts:
                    shared = model.shared_block(layer)
                    modules = [block] if shared is None else [block, shared]
                    sorts[sort] = kept_bytes(modules, partial(block, u, batch, None, shared))
                kept.append(sorts[sort])
            targets = torch.zeros(rows, seq_len, dtype=torch.int64)
            logits = kept_bytes(
                (model,), lambda: cross_entropy(model.logits(model.norm(u)), targets)
            )
    finally:
        torch.set_default_dtype(standard)
    return kept, logits


def kept_bytes(modules: Iterable[nn.Module], run: Callable[[], object]) -> int:
    """Return the bytes that autograd keeps of a computation, without these modules' parameters."""
    weights = {p.untyped_storage()._cdata for module in modules for p in module.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outcome = run()
    total = sum(storage.nbytes() for storage in storages.values())
    del outcome
    return total


def generation_bytes(config: ModelConfig, seq_len: int, *, precision: Precision) -> int:
    """Return the bytes of one sequence in generation: constant states, and caches that grow with
    the sequence."""
    model = build_meta(config).to(precision.compute)
    with torch.device("meta"):
        u = torch.empty(1, 1, config.width, dtype=precision.compute)
        positions = torch.zeros(1, 1, dtype=torch.int64)
        total = 0
        for layer, block in zip(config.layers, model.typed_blocks(), strict=True):
            batch = BatchContext(positions, embeddings=u)
            states = []
            shared = model.shared_block(layer)
            if block.call is not None:
                states.append(State(seq_len))
                block.call(shared, u, batch.for_call(states[-1]))
            for branch in block.branches():
                if not branch.operator.tokenwise:
                    states.append(State(seq_len))
                    branch.operator(u, BatchContext(positions, state=states[-1]))
            total += sum(tensor.nbytes for state in states for tensor in state.tensors.values())
    return total
