"""Which matrix products run in FP8, and why the others do not.

The choice depends only on the unsharded model, so every layout makes the same choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import nn

from ..config.options.precision import Fp8Config
from ..layers.fp8 import MULTIPLE
from ..layers.linear import OutputLinear, SplitLinear
from ..layers.norms import RMSNorm
from ..model.model import Model
from ..operators import Operator
from ..operators.hyena import Hyena

Linear = SplitLinear | OutputLinear
FP8_PRODUCTS, ALL_PRODUCTS = 2, 3
"""Products per matrix in a training step: in FP8 (forward, input gradient) and in total (weight
gradient too)."""


@dataclass(frozen=True)
class Matrix:
    """A matrix that multiplies every token, or some of its rows. A shared block's matrices count
    once per call."""

    name: str
    flops: float
    """Forward FLOPs per token."""
    reason: str | None
    """Why its products stay in the compute precision; None: they run in FP8."""
    module: Linear | None = None
    layer: int | None = None
    """Layer that uses it; None: embedding and head."""


def quantize(model: Model, config: Fp8Config | None) -> Model:
    """Mark the chosen matrices, and the norms before them, in a model that is not yet cut or
    sharded. Return the model."""
    for matrix in iterate_matrices(model, config) if config is not None else ():
        if matrix.module is not None and matrix.reason is None:
            matrix.module.fp8 = True
    for branch in chain.from_iterable(block.branches() for block in model.typed_blocks()):
        children = (child for operator in branch.operators for child in operator.children())
        readers = (child for child in children if isinstance(child, SplitLinear))
        multiplies = any(before != 1 for before, _ in branch.multipliers)
        reads_norm = isinstance(branch.norm, RMSNorm) and not multiplies
        branch.stores = reads_norm and any(child.fp8 for child in readers)
    return model


def summary(model: Model, config: Fp8Config) -> dict[str, Any]:
    """Summarise the choice for people: matrices in FP8, matrices in bf16 with a reason, and FLOP
    shares. Equal matrices in several layers are a single entry, with `*` as layer number."""
    chosen = list(iterate_matrices(model, config))
    entries: dict[tuple[str, str | None], dict[str, Any]] = {}
    for matrix in chosen:
        name = ".".join("*" if word.isdigit() else word for word in matrix.name.split("."))
        new_entry = {
            "matrix": name,
            "count": 0,
            "forward_flops_per_token": 0.0,
            "reason": matrix.reason,
        }
        entry = entries.setdefault((name, matrix.reason), new_entry)
        entry["count"] += 1
        entry["forward_flops_per_token"] += matrix.flops
    share = fp8_share(chosen)
    return {
        "share": share,
        "training_share": share * FP8_PRODUCTS / ALL_PRODUCTS,
        "fp8": [entry for entry in entries.values() if entry["reason"] is None],
        "bf16": [entry for entry in entries.values() if entry["reason"] is not None],
    }


def fp8_share(matrices: Iterable[Matrix]) -> float:
    """Return FP8 FLOPs divided by all matrices' FLOPs."""
    flops = [(matrix.flops, matrix.reason is None) for matrix in matrices]
    return sum(count for count, in_fp8 in flops if in_fp8) / sum(count for count, _ in flops)


def iterate_matrices(model: Model, config: Fp8Config) -> Iterator[Matrix]:
    """Yield an unsharded model's matrices."""
    yield Matrix("embedding", 0.0, "table")
    if model.positions is not None:
        yield Matrix("positions", 0.0, "table")
    layers = model.config.layers
    for number, (layer, block) in enumerate(zip(layers, model.typed_blocks(), strict=True)):
        at_end = min(number, len(layers) - 1 - number) < config.ends
        shared = model.shared_block(layer)
        if shared is not None and block.call is not None:
            for matrix in _operator_matrices(f"shared.{layer.shared}", shared, config):
                yield replace(matrix, layer=number)
            for path, module in block.call.named_modules():
                if isinstance(module, nn.Linear):
                    name = f"blocks.{number}.call.{path}"
                    yield Matrix(name, _flops(module), "call of a shared block", layer=number)
        for name, operator in zip(layer.branches, block.operators(), strict=True):
            prefix = f"blocks.{number}.{name}"
            for matrix in _operator_matrices(prefix, operator, config, at_end=at_end):
                yield replace(matrix, layer=number)
    yield Matrix("head", 2.0 * (model.head or model.embedding).weight.numel(), "head")


def _operator_matrices(
    prefix: str, operator: Operator, config: Fp8Config, *, at_end: bool = False
) -> Iterator[Matrix]:
    for path, module in operator.named_modules():
        name = f"{prefix}.{path}"
        if isinstance(module, Linear):
            columns, narrow_rows = module.weight.shape[1], module.narrow_rows()
            summed = "ranks may hold parts of its gradients"
            reason = _bf16_reason(operator, module, config, at_end)
            reason = summed if path in operator.unrounded else reason
            yield Matrix(name, 2.0 * narrow_rows * columns, reason, module)
            if wide_rows := len(module.weight) - narrow_rows:
                assert isinstance(module, SplitLinear)
                name = f"{name}[{', '.join(module.wide)}]"
                yield Matrix(name, 2.0 * wide_rows * columns, "selects states")
        elif isinstance(module, nn.Linear):
            if path.partition(".")[0] in operator.once:
                yield Matrix(name, 0.0, "runs once for a batch")
            else:
                reason = "router" if operator.experts else "the same on all tensor-parallel ranks"
                yield Matrix(name, _flops(module), reason)
    if stacks := operator.stacks():
        flops = operator.flops(1)
        total = flops.get("experts", 0.0) + flops.get("projections", 0.0)
        reason = "experts" if operator.experts else "selects states"
        yield Matrix(f"{prefix}.[{', '.join(stacks)}]", total, reason)


def _bf16_reason(operator: Operator, module: Linear, config: Fp8Config, at_end: bool) -> str | None:
    """Return why a projection stays in the compute precision; None if it runs in FP8."""
    rows, columns = module.narrow_rows(), module.weight.shape[1]
    if config.matrices != "all" and not isinstance(operator, Hyena):
        return "not of a Hyena operator"
    if config.matrices == "evo2" and not isinstance(module, SplitLinear):
        return "not an input projection"
    if at_end:
        return "in a block at an end"
    if min(rows, columns) < config.smallest:
        return f"smaller than {config.smallest:,}"
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"not a multiple of {MULTIPLE}"
    return None


def _flops(linear: nn.Linear) -> float:
    return 2.0 * linear.weight.numel()
