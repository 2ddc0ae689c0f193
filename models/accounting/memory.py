"""Shards of one rank, results that its layers keep for the planner, and the states of generation.

Nothing is allocated. One layer of each sort runs on fake tensors, and every storage that autograd
keeps is counted once. The memory of a whole step is in step.py.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...console.errors import LayoutError
from ..config import ModelConfig
from ..fp8 import quantize
from ..layers.recompute import OPERATIONS, Results, Rule, Selective
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


@dataclass(frozen=True)
class KeptLayer:
    """Bytes that a micro-batch keeps of a layer, over all ranks that share its rows."""

    everything: int
    """Tensors that the backward pass needs."""
    stream: int
    """The layer's input."""
    calls: int
    """Operator calls, each with an input of that size."""
    results: Mapping[Results, int]
    """Results of operations, by kind."""
    needed_results: Mapping[Results, int]
    """Results that the backward pass needs."""

    def forward(self, rule: Rule) -> int:
        """Return the bytes kept from the layer's forward to its backward pass."""
        if isinstance(rule, Selective):
            return self.stream + sum(self.results[kind] for kind in rule.save)
        return {
            "none": self.everything,
            "operator": self.calls * self.stream,
            "block": self.stream,
        }[rule]

    def backward(self, rule: Rule) -> int:
        """Return the bytes kept in addition while the layer's backward pass runs."""
        if isinstance(rule, Selective):
            return self.everything - sum(self.needed_results[kind] for kind in rule.save)
        return 0 if rule == "none" else self.everything


@dataclass(frozen=True)
class Kept:
    """Bytes that a micro-batch keeps for its backward pass, over all ranks that share its rows."""

    layers: Sequence[KeptLayer]
    logits: int
    """Logits and loss in plain torch."""

    def by_layer(self, rules: Sequence[Rule]) -> tuple[list[int], list[int]]:
        """Return the bytes of each layer: kept until its backward pass, and in addition during
        it."""
        pairs = list(zip(self.layers, rules, strict=True))
        return (
            [layer.forward(rule) for layer, rule in pairs],
            [layer.backward(rule) for layer, rule in pairs],
        )


def kept_by_layer(config: ModelConfig, seq_len: int, *, rows: int, precision: Precision) -> Kept:
    layers, logits = activations(config, seq_len, rows=rows, precision=precision)
    stream = rows * seq_len * config.width * precision.weight_bytes
    calls = [len(layer.branches) + (layer.shared is not None) for layer in config.layers]
    kept = []
    for (everything, *results), count in zip(layers, calls, strict=True):
        half = len(OPERATIONS)
        made = dict(zip(OPERATIONS, results[:half], strict=True))
        needed = dict(zip(OPERATIONS, results[half:], strict=True))
        kept.append(KeptLayer(everything, stream, count, made, needed))
    return Kept(kept, logits)


Sizes = tuple[int, ...]
"""Bytes of a layer: all that is kept, the results of operations by kind, and, also by kind, the
results that the backward pass needs."""


def activations(
    config: ModelConfig, seq_len: int, *, rows: int, precision: Precision
) -> tuple[list[Sizes], int]:
    """Return the bytes kept for the backward pass: of each layer, and of the logits and the loss.

    They grow with the length and, where there is a mask, with its square: for long rows they are
    extrapolated from three shorter ones.
    """
    if seq_len <= LONGEST:
        return measured(config, seq_len, rows=rows, precision=precision)
    lengths = (LONGEST // 4, LONGEST // 2, LONGEST)
    samples = [measured(config, n, rows=rows, precision=precision) for n in lengths]
    kept = [
        tuple(extrapolated(lengths, sizes, seq_len) for sizes in zip(*layer, strict=True))
        for layer in zip(*(layers for layers, _ in samples), strict=True)
    ]
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
) -> tuple[list[Sizes], int]:
    standard = torch.get_default_dtype()
    torch.set_default_dtype(precision.compute)
    try:
        with FakeTensorMode():
            model = quantize(Model(config), precision.fp8)
            u = torch.empty(rows, seq_len, config.width, requires_grad=True)
            batch = BatchContext(torch.arange(seq_len).unsqueeze(0), embeddings=u)
            sorts: dict[str, Sizes] = {}
            kept = []
            for layer, block in zip(config.layers, model.typed_blocks(), strict=True):
                narrow = sum(getattr(module, "fp8", False) for module in block.modules())
                sort = f"{layer!r}, {narrow} matrices in FP8"
                if sort not in sorts:
                    shared = model.shared_block(layer)
                    modules = [block] if shared is None else [block, shared]
                    sorts[sort] = kept_sizes(modules, partial(block, u, batch, None, shared))
                kept.append(sorts[sort])
            targets = torch.zeros(rows, seq_len, dtype=torch.int64)
            logits, *_ = kept_sizes(
                (model,), lambda: cross_entropy(model.logits(model.norm(u)), targets)
            )
    finally:
        torch.set_default_dtype(standard)
    return kept, logits


Storages = dict[int, torch.UntypedStorage]


def kept_sizes(modules: Iterable[nn.Module], run: Callable[[], object]) -> Sizes:
    """Return the bytes that autograd keeps of a computation, without these modules' parameters,
    and those of its results by kind."""
    weights = {p.untyped_storage()._cdata for module in modules for p in module.parameters()}
    kept: Storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Made() as made:
        outcome = run()
    results = [made.storages[kind] for kind in OPERATIONS]
    needed = [{key: kept[key] for key in each.keys() & kept.keys()} for each in results]
    total = tuple(
        sum(storage.nbytes() for storage in each.values()) for each in (kept, *results, *needed)
    )
    del outcome
    return total


class Made(TorchDispatchMode):
    """Collect the results of operations by kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[Results, Storages] = {kind: {} for kind in OPERATIONS}
        self.kinds = {kind: Selective(save=(kind,)) for kind in OPERATIONS}

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        made = operation(*inputs, **(options or {}))
        for kind, save in self.kinds.items():
            for tensor in tree_leaves(made) if save.keeps(operation) else ():
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    self.storages[kind][storage._cdata] = storage
        return made


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
