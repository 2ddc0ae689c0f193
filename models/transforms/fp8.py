"""Choice of the matrices whose products run in FP8, and a list of those that stay as they are.

The choice depends on the whole model alone, so it is the same in every layout.
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
NARROW, TRAINING = 2, 3
"""Products of a matrix in a training step: those in FP8 (forward, gradient of the input), all (also
the gradient of the matrix)."""


@dataclass(frozen=True)
class Matrix:
    """A matrix that every token is multiplied by, or a part of its rows. Matrices of shared blocks
    count once for each call."""

    name: str
    flops: float
    """Forward FLOPs for each token."""
    reason: str | None
    """Reason why its products stay in the compute precision; None: they run in FP8."""
    module: Linear | None = None
    layer: int | None = None
    """Layer that multiplies by it; None: the embedding and the head."""


def quantize(model: Model, config: Fp8Config | None) -> Model:
    """Mark the chosen matrices of a whole model, before it is cut and sharded, and the norms before
    them. Return it."""
    for matrix in matrices(model, config) if config is not None else ():
        if matrix.module is not None and matrix.reason is None:
            matrix.module.fp8 = True
    for branch in chain.from_iterable(block.branches() for block in model.typed_blocks()):
        readers = (each for each in branch.operator.children() if isinstance(each, SplitLinear))
        branch.stores = isinstance(branch.norm, RMSNorm) and any(each.fp8 for each in readers)
    return model


def summary(model: Model, config: Fp8Config) -> dict[str, Any]:
    """Return the matrices in FP8, the others with the reason, and the shares of FLOPs, for people.
    Layers with the same matrices are one entry, whose name has `*` for their numbers."""
    found = list(matrices(model, config))
    entries: dict[tuple[str, str | None], dict[str, Any]] = {}
    for matrix in found:
        name = ".".join("*" if word.isdigit() else word for word in matrix.name.split("."))
        new = {"matrix": name, "count": 0, "forward_flops_per_token": 0.0, "reason": matrix.reason}
        entry = entries.setdefault((name, matrix.reason), new)
        entry["count"] += 1
        entry["forward_flops_per_token"] += matrix.flops
    share = fp8_share(found)
    return {
        "share": share,
        "training_share": share * NARROW / TRAINING,
        "fp8": [entry for entry in entries.values() if entry["reason"] is None],
        "bf16": [entry for entry in entries.values() if entry["reason"] is not None],
    }


def fp8_share(matrices: Iterable[Matrix]) -> float:
    """Return the share of the FLOPs of all matrices that belongs to matrices in FP8."""
    flops = [(matrix.flops, matrix.reason is None) for matrix in matrices]
    return sum(each for each, narrow in flops if narrow) / sum(each for each, _ in flops)


def matrices(model: Model, config: Fp8Config) -> Iterator[Matrix]:
    """Yield the matrices of a whole model."""
    yield Matrix("embedding", 0.0, "table")
    if model.positions is not None:
        yield Matrix("positions", 0.0, "table")
    layers = model.config.layers
    for number, (layer, block) in enumerate(zip(layers, model.typed_blocks(), strict=True)):
        end = min(number, len(layers) - 1 - number) < config.ends
        shared = model.shared_block(layer)
        if shared is not None and block.call is not None:
            for matrix in _of_operator(f"shared.{layer.shared}", shared, config):
                yield replace(matrix, layer=number)
            for path, module in block.call.named_modules():
                if isinstance(module, nn.Linear):
                    name = f"blocks.{number}.call.{path}"
                    yield Matrix(name, _flops(module), "call of a shared block", layer=number)
        for name, branch in zip(layer.branches, block.branches(), strict=True):
            place = f"blocks.{number}.{name}"
            for matrix in _of_operator(place, branch.operator, config, end=end):
                yield replace(matrix, layer=number)
    yield Matrix("head", 2.0 * (model.head or model.embedding).weight.numel(), "head")


def _of_operator(
    place: str, operator: Operator, config: Fp8Config, *, end: bool = False
) -> Iterator[Matrix]:
    for path, module in operator.named_modules():
        name = f"{place}.{path}"
        if isinstance(module, Linear):
            columns, narrow = module.weight.shape[1], module.narrow_rows()
            reason = _reason(operator, module, config, end)
            yield Matrix(name, 2.0 * narrow * columns, reason, module)
            if wide := len(module.weight) - narrow:
                assert isinstance(module, SplitLinear)
                name = f"{name}[{', '.join(module.wide)}]"
                yield Matrix(name, 2.0 * wide * columns, "selects states")
        elif isinstance(module, nn.Linear):
            if path.partition(".")[0] in operator.once:
                yield Matrix(name, 0.0, "runs once for a batch")
            else:
                yield Matrix(name, _flops(module), "router")
    if stacks := operator.stacks():
        flops = operator.flops(1)
        total = flops.get("experts", 0.0) + flops.get("projections", 0.0)
        reason = "experts" if operator.experts else "selects states"
        yield Matrix(f"{place}.[{', '.join(stacks)}]", total, reason)


def _reason(operator: Operator, module: Linear, config: Fp8Config, end: bool) -> str | None:
    """Return why a projection stays in the compute precision, or None."""
    rows, columns = module.narrow_rows(), module.weight.shape[1]
    if config.matrices != "all" and not isinstance(operator, Hyena):
        return "not of a Hyena operator"
    if config.matrices == "evo2" and not isinstance(module, SplitLinear):
        return "not an input projection"
    if end:
        return "in a block at an end"
    if min(rows, columns) < config.smallest:
        return f"smaller than {config.smallest:,}"
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"not a multiple of {MULTIPLE}"
    return None


def _flops(linear: nn.Linear) -> float:
    return 2.0 * linear.weight.numel()
