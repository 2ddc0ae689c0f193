"""Memory, from the module itself: what autograd would keep, and what generation carries along.

Nothing is allocated: the model is built of fake tensors, one layer of each sort is run, and every
storage that autograd keeps is counted once. It is what the plain operators need; fused kernels
need less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ...console.errors import LayoutError
from ..block import Block
from ..config import ModelConfig
from ..loss import cross_entropy
from ..model import Model
from ..operators import BatchContext, SharedOperator, State
from ..parallel.axes import Axes, Axis
from .count import build_meta, parameters

Precision = Literal["bf16", "fp32"]
LONGEST = 4096
"""Of the rows that are run; the activations of longer ones are computed from these."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is divided among devices."""

    zero: int = 0
    dp: int = 1
    tp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        if self.zero not in range(4) or min(self.dp, self.tp, self.cp) < 1:
            raise ValueError(f"zero is 0, 1, 2 or 3, and dp, tp and cp at least 1: {self}")


def memory(
    config: ModelConfig, seq_len: int, *, rows: int, precision: Precision, layout: Layout
) -> dict[str, Any]:
    """Bytes on one device that trains `rows` sequences at once, and of one sequence's states."""
    size = DTYPES[precision].itemsize
    count = largest_part(config, layout.tp)
    copies = layout.dp * layout.cp
    # bf16 keeps an fp32 master beside the two moments of AdamW.
    optimizer = count * (8 if precision == "fp32" else 12)
    kept, logits = activations(config, seq_len, rows=rows, precision=precision)
    stream = rows * seq_len * config.width * size
    branches = sum(len(layer.branches) + (layer.shared is not None) for layer in config.layers)
    largest = max(kept)
    divided = layout.tp * layout.cp
    return {
        "precision": precision,
        "rows": rows,
        "seq_len": seq_len,
        "layout": {"zero": layout.zero, "dp": layout.dp, "tp": layout.tp, "cp": layout.cp},
        "weights": round(count * size / (copies if layout.zero >= 3 else 1)),
        "gradients": round(count * 4 / (copies if layout.zero >= 2 else 1)),
        "optimizer": round(optimizer / (copies if layout.zero >= 1 else 1)),
        "activations": {
            "none": round(sum(kept) / divided),
            "operator": round((stream * branches + largest) / divided),
            "block": round((stream * len(config.layers) + largest) / divided),
        },
        "logits": round(logits / divided),
        "generation_state": state_bytes(config, seq_len, precision=precision),
    }


def largest_part(config: ModelConfig, tp: int) -> int:
    """Parameters on the last process of a tensor axis, which has the most."""
    wrong = list(config.tp_problems(tp))
    if wrong:
        raise LayoutError("\n  ".join([f"tp={tp} does not divide this model", *wrong]))
    model = build_meta(config)
    model.shard(Axes(tensor=Axis(None, tp - 1, tp)))
    return parameters(model)


def activations(
    config: ModelConfig, seq_len: int, *, rows: int, precision: Precision
) -> tuple[list[int], int]:
    """What is kept for the backward pass: of each layer; and of the logits and the loss.

    It grows with the length and, where there is a mask, with its square: of long rows, three
    shorter ones tell.
    """
    if seq_len <= LONGEST:
        return measured(config, seq_len, rows=rows, precision=precision)
    lengths = (LONGEST // 4, LONGEST // 2, LONGEST)
    samples = [measured(config, n, rows=rows, precision=precision) for n in lengths]
    layers = zip(*(kept for kept, _ in samples), strict=True)
    kept = [extrapolated(lengths, sizes, seq_len) for sizes in layers]
    return kept, extrapolated(lengths, tuple(logits for _, logits in samples), seq_len)


def extrapolated(lengths: tuple[int, ...], sizes: tuple[int, ...], length: int) -> int:
    """The value at `length` of the polynomial through all of the points."""
    total = Fraction(0)
    for n, size in zip(lengths, sizes, strict=True):
        share = Fraction(size)
        for other in lengths:
            if other != n:
                share *= Fraction(length - other, n - other)
        total += share
    return round(total)


def measured(
    config: ModelConfig, seq_len: int, *, rows: int, precision: Precision
) -> tuple[list[int], int]:
    standard = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[precision])
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
                    sorts[sort] = block_bytes(block, u, batch, model.shared_block(layer))
                kept.append(sorts[sort])
            targets = torch.zeros(rows, seq_len, dtype=torch.int64)
            logits = kept_bytes(model, lambda: cross_entropy(model.logits(model.norm(u)), targets))
    finally:
        torch.set_default_dtype(standard)
    return kept, logits


def block_bytes(block: Block, u: Tensor, batch: BatchContext, shared: SharedOperator | None) -> int:
    total = 0
    if block.call is not None:
        assert shared is not None
        total += kept_bytes(shared, partial(block.call, shared, u, batch))
    for branch in block.branches():
        total += kept_bytes(branch, partial(branch, u, batch, None))
    return total


def kept_bytes(module: torch.nn.Module, run: Callable[[], object]) -> int:
    weights = {p.untyped_storage()._cdata for p in module.parameters()}
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


def state_bytes(config: ModelConfig, seq_len: int, *, precision: Precision) -> int:
    """Of one sequence in generation: constant states, and caches as long as the sequence."""
    model = build_meta(config).to(DTYPES[precision])
    with torch.device("meta"):
        u = torch.empty(1, 1, config.width, dtype=DTYPES[precision])
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
