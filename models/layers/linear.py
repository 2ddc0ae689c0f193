"""Projections at an operator's two ends: named ones from a shared input, and the output.

`models/transforms/fp8.py` chooses those whose products run in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..kernels.fp8 import Quantized
from ..parallel.axes import Axis
from ..parallel.local_shard import Sharded, ShardingSpec
from .fp8 import fp8_linear


class SplitLinear(nn.Module):
    """Returns one tensor for each part: `q, k, v = SplitLinear(d, {"q": d, "k": d, "v": d})(x)`.

    `parts` names the rows of the weight, so that tensor parallelism can shard every part separately
    and conversion can extract it. The parts `wide`, the last ones, never run in FP8.
    """

    fp8: bool = False
    axis: str = ""
    """Tensor-parallel axis name; its ranks share the outputs."""

    def __init__(
        self,
        width: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        wide: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.wide = wide
        assert wide == tuple(parts)[len(parts) - len(wide) :]
        num_rows = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(num_rows, width))
        self.bias = nn.Parameter(torch.empty(num_rows)) if bias else None

    def forward(
        self,
        x: Tensor,
        stored: Quantized | None = None,
        *,
        joined: bool = False,
        sizes: Sequence[int] | None = None,
        share: Axis | None = None,
        use: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Map x [..., width] to a tensor [..., part size] per part; `joined` returns them
        concatenated, for kernels that take them so.

        `stored` is x in FP8, if a kernel stored it; `sizes` overrides the returned tensors' widths;
        with `share`, each rank of that axis computes its part of every part, without a bias or FP8;
        with `use`, the result is use(x, weight). (ZeRO-3 gathers weights at a module's call, so
        nothing else may read them.)
        """
        if use is not None:
            return use(x, self.weight)
        sizes = list(sizes or self.parts.values())
        weight: Tensor = self.weight
        if share is not None:
            assert self.bias is None and not self.fp8
            sizes = [len(share.part_range(size)) for size in sizes]
            parts = weight.split(list(self.parts.values()))
            weight = torch.cat([part[share.part(len(part))] for part in parts])
        if self.fp8:
            quantized = stored or (None, None)
            y = fp8_linear(x, *quantized, weight, self.bias, self.narrow_rows(), "", self.axis)
        elif not joined and fuses_gradient_sums(x, weight):
            return split_product(x, weight, self.bias, sizes)
        else:
            y = F.linear(x, weight, self.bias)
        return y if joined else torch.split(y, sizes, dim=-1)

    def narrow_rows(self) -> int:
        """Count the rows that may run in FP8; they are the first."""
        return sum(size for part, size in self.parts.items() if part not in self.wide)

    def resize(self, axis: Axis) -> None:
        self.axis = axis.name
        self.parts = {name: len(axis.part_range(size)) for name, size in self.parts.items()}


class OutputLinear(nn.Linear):
    """The projection back to the residual stream.

    Under tensor parallelism each rank has some inputs, and the ranks' outputs are summed: each rank
    adds bias / ranks.
    """

    fp8: bool = False
    ranks: int = 1
    axis: str = ""
    """Tensor-parallel axis name; its ranks share the inputs."""

    def forward(self, x: Tensor, stored: Quantized | None = None) -> Tensor:
        """Map x [..., in_features] to [..., out_features]. `stored` is x in FP8, if a kernel stored
        it."""
        bias = self.bias if self.bias is None or self.ranks == 1 else self.bias / self.ranks
        if self.fp8:
            rows, quantized = self.narrow_rows(), stored or (None, None)
            y: Tensor = fp8_linear(x, *quantized, self.weight, bias, rows, self.axis, "")
            return y
        return F.linear(x, self.weight, bias)

    @property
    def takes_stored(self) -> bool:
        """True if a kernel may store the input in FP8: its rows are whole on this rank."""
        return self.fp8 and self.ranks == 1

    def narrow_rows(self) -> int:
        """Count the rows that may run in FP8."""
        return self.out_features

    def resize(self, axis: Axis) -> None:
        self.ranks, self.axis = axis.size, axis.name


def fuses_gradient_sums(*operands: Tensor) -> bool:
    """Return True if matrix products should add up gradients: on CUDA, where passes over memory are
    expensive. (A compiled graph fuses such passes itself; autocast casts its own operands.)"""
    if operands[0].device.type != "cuda" or is_compiling() or torch.is_autocast_enabled("cuda"):
        return False
    return len({operand.dtype for operand in operands}) == 1


def split_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """Return x·Wᵀ + bias, split into tensors [..., size], for x [..., in] and W [Σ sizes, in].

    Gradients are not concatenated: each is multiplied by its rows in W, and the products add to a
    single gradient for x.
    """
    outputs: tuple[Tensor, ...] = _SplitProduct.apply(x, weight, bias, list(sizes))
    return outputs


class _SplitProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.bias = sizes, bias is not None
        product = F.linear(x, weight, bias)
        outputs: tuple[Tensor, ...] = product.split_with_sizes(sizes, dim=-1)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat, rows = x.flatten(0, -2), weight.split_with_sizes(ctx.sizes)
        part_grads = [grad.flatten(0, -2) for grad in grads]
        grad_x = part_grads[0] @ rows[0]
        for part_grad, part_rows in zip(part_grads[1:], rows[1:], strict=True):
            torch.addmm(grad_x, part_grad, part_rows, out=grad_x)
        grad_weight = torch.empty_like(weight)
        weight_parts = grad_weight.split_with_sizes(ctx.sizes)
        for part_grad, part_rows in zip(part_grads, weight_parts, strict=True):
            torch.mm(part_grad.t(), flat, out=part_rows)
        grad_bias = torch.cat([part_grad.sum(0) for part_grad in part_grads]) if ctx.bias else None
        return grad_x.view(x.shape), grad_weight, grad_bias, None


def product_with_input(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., in] and x·Wᵀ [..., out]. The backward product adds the gradient of the
    returned x."""
    same_x, y = _ProductWithInput.apply(x, weight)
    return same_x, y


class _ProductWithInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x, F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        total_grad = torch.addmm(grad_x.flatten(0, -2), grad, weight)
        return total_grad.view(x.shape), grad.t() @ x.flatten(0, -2)


def outputs(name: str, linear: nn.Linear | SplitLinear, *, blocks: int = 1) -> ShardingSpec:
    """Shard the matrix `name` by outputs: every SplitLinear part separately, and if a part consists
    of several `blocks`, every block."""
    part_sizes = [len(linear.weight)]
    if isinstance(linear, SplitLinear):
        part_sizes = list(linear.parts.values())
    shard = Sharded(0, tuple(size // blocks for size in part_sizes for _ in range(blocks)))
    return {f"{name}.weight": shard, f"{name}.bias": shard}


def inputs(name: str, *, blocks: tuple[int, ...] = ()) -> ShardingSpec:
    """Shard the matrix `name` by its inputs: the ranks' outputs must be summed."""
    return {f"{name}.weight": Sharded(1, blocks)}
