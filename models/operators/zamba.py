"""Zamba's shared block: attention and MLP with the same weights, called at many depths.

    a = MLP(norm(Attn(norm([h; e]))))          e: the embeddings; no residual inside
    h ← h + Mixer(norm(h + a·L_i))             the layer that the block feeds; L_i per call

Attention has twice the model's width: its heads have 2D/H channels and the softmax is scaled by
(2D/H / 2)^−½. In Zamba2 each call has low-rank corrections (LoRA) to the MLP's first matrix, and in
some models to q, k and v.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..config.options.attention import AttentionOptions
from ..config.options.zamba import ZambaBlockOptions
from ..kernels.choice import requests_kernel
from ..layers.initializers import Initializers
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..layers.norms import RMSNorm
from ..parallel.axes import Axes
from ..parallel.local_shard import Sharded, ShardingSpec
from ..parallel.tensor import gather, scatter
from .attention import Attention
from .base import BatchContext, SharedCall, SharedOperator
from .mlp import gate_for_product


class ZambaBlock(SharedOperator):
    Options = ZambaBlockOptions

    def __init__(self, options: ZambaBlockOptions, width: int) -> None:
        super().__init__(options, width)
        self.norm = RMSNorm(2 * width, options.norm_eps, kernel=options.kernel)
        attention = AttentionOptions(heads=options.heads, rope=options.rope, kernel=options.kernel)
        self.attention = Attention(attention, width, input_width=2 * width)
        self.attention.scale = (self.attention.head_dim / 2) ** -0.5
        self.mlp_norm = RMSNorm(width, options.norm_eps, kernel=options.kernel)
        self.gate_up = SplitLinear(width, {"gate": options.hidden, "up": options.hidden})
        self.down = OutputLinear(options.hidden, width, bias=False)

    def forward(self, h: Tensor, batch: BatchContext) -> Tensor:
        """Map h [b, local_length, width], this rank's slice of each sequence, to the same shape."""
        assert batch.embeddings is not None and batch.adapters is not None
        adapters, axis = batch.adapters, batch.axes.tensor
        x = gather(self.norm(torch.cat([h, batch.embeddings], dim=-1)), axis)
        # A compiled graph fuses the sums itself.
        adds_in_place = requests_kernel(self.options.kernel, x.device) and not is_compiling()
        qkv = self.attention.qkv(x, joined=True)
        widths = list(self.attention.qkv.parts.values())
        if adapters.qkv is not None and adds_in_place:
            for correction, start in zip(adapters.qkv, accumulate([0, *widths[:-1]]), strict=True):
                qkv = correction(x, qkv, start)
        q, k, v = qkv.split(widths, dim=-1)
        if adapters.qkv is not None and not adds_in_place:
            q, k, v = (
                t + correction(x) for t, correction in zip((q, k, v), adapters.qkv, strict=True)
            )
        attended = scatter(self.attention.attend(q, k, v, batch), axis)
        x = gather(self.mlp_norm(attended), axis)
        hidden = self.gate_up(x, joined=True)
        if adapters.gate_up is not None:
            correction = adapters.gate_up
            hidden = correction(x, hidden) if adds_in_place else hidden + correction(x)
        gated = gate_for_product(self.down, hidden, self.options.activation, self.options.kernel)
        return scatter(self.down(*gated), axis)

    def untraced(self, axes: Axes, device: torch.device) -> str | None:
        return self.attention.untraced(axes, device)

    def new_call(self) -> ZambaCall:
        """Create a call's weights."""
        return ZambaCall(self.options, self.width)

    def init_weights(self, init: Initializers) -> None:
        init.norm(self.norm)
        init.norm(self.mlp_norm)
        self.attention.init_weights(init)
        init.linear(self.gate_up)
        init.output(self.down)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard the MLP; attention has its own spec."""
        return {**outputs("gate_up", self.gate_up), **inputs("down")}

    def flops(self, length: int) -> dict[str, float]:
        return self.attention.flops(length)


class LowRank(nn.Module):
    """x·A·B, initially zero."""

    def __init__(self, inputs: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = AddedLinear(rank, outputs, bias=False)

    def forward(self, x: Tensor, base: Tensor | None = None, first_column: int = 0) -> Tensor:
        """Return x·A·B [..., outputs]; with a base [..., ≥ outputs], add it in place to the base's
        columns from `first_column` on."""
        product: Tensor = self.up(self.down(x), base, first_column)
        return product


class AddedLinear(nn.Linear):
    """A product that is added to `base` without an extra pass over memory."""

    def forward(self, x: Tensor, base: Tensor | None = None, first_column: int = 0) -> Tensor:
        """Return x·Wᵀ [..., out]; with a base, add it in place to the base's columns from
        `first_column` on."""
        if base is None:
            return super().forward(x)
        total: Tensor = _AddedProduct.apply(base, x, self.weight, first_column)
        return total


class _AddedProduct(torch.autograd.Function):
    """Add x·Wᵀ in place to base's columns from `first_column` on."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, x: Tensor, weight: Tensor, first_column: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.first_column = first_column
        ctx.mark_dirty(base)
        columns = base[..., first_column : first_column + len(weight)].flatten(0, -2)
        torch.addmm(columns, x.flatten(0, -2), weight.T, out=columns)
        return base

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        columns = grad[..., ctx.first_column : ctx.first_column + len(weight)].flatten(0, -2)
        grad_x = (columns @ weight).view(x.shape)
        return grad, grad_x, columns.T @ x.flatten(0, -2), None


class ZambaCall(SharedCall):
    """A call's weights: the map L_i into the layer, and the corrections."""

    def __init__(self, options: ZambaBlockOptions, width: int) -> None:
        super().__init__()
        self.options = options
        rank = options.lora_rank
        self.project = nn.Linear(width, width, bias=False)
        self.qkv = (
            nn.ModuleList(LowRank(2 * width, rank, 2 * width) for _ in "qkv")
            if options.attention_lora
            else None
        )
        self.gate_up = LowRank(width, rank, 2 * options.hidden) if rank else None

    def forward(self, operator: nn.Module, x: Tensor, batch: BatchContext) -> Tensor:
        """Map x [b, local_length, width], this rank's slice of each sequence, to the same shape."""
        result: Tensor = self.project(operator(x, replace(batch, adapters=self)))
        return result

    def init_weights(self, init: Initializers) -> None:
        init.output(self.project)
        for module in self.modules():
            if isinstance(module, LowRank):
                init.linear(module.down)
                init.constant(module.up.weight, 0.0)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard corrections like the matrices that they correct; replicate L_i."""
        hidden = self.options.hidden
        return {
            **({f"qkv.{index}.up.weight": Sharded(0) for index in range(3)} if self.qkv else {}),
            **({"gate_up.up.weight": Sharded(0, (hidden, hidden))} if self.gate_up else {}),
        }
