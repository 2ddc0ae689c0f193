"""Attention: softmax(q·kᵀ/√d)·v over the document's past; query heads may share keys and values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..config.options.attention import AttentionOptions
from ..documents import Documents
from ..layers.attention.packed import applies, packed_attention
from ..layers.attention.ring_flash import ring_flash_attention
from ..layers.initializers import Initializers
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..layers.norms import RMSNorm
from ..layers.rope import rotate, rotation
from ..parallel.axes import Axes, Axis
from ..parallel.heads import from_heads, to_heads
from ..parallel.local_shard import ShardingSpec
from ..parallel.ring import FirstKeys, Zigzag, ring_attention
from ..parallel.tensor import own_groups
from .base import BatchContext, Operator, State


class Attention(Operator):
    Options = AttentionOptions

    def __init__(self, options: AttentionOptions, width: int, input_width: int = 0) -> None:
        """`input_width`: width of the input, if it differs from that of the output."""
        super().__init__(options, width)
        self.head_dim = dim = options.dim(input_width or width)
        kv = dim * (options.kv_heads or options.heads)
        parts = {"q": dim * options.heads, "k": kv, "v": kv}
        self.qkv = SplitLinear(input_width or width, parts, bias=options.qkv_bias)
        self.q_norm = RMSNorm(dim, 1e-6, kernel=options.kernel) if options.qk_norm else None
        self.k_norm = RMSNorm(dim, 1e-6, kernel=options.kernel) if options.qk_norm else None
        self.out = OutputLinear(dim * options.heads, width, bias=options.output_bias)
        self.scale = dim**-0.5

    def forward(self, x: Tensor, batch: BatchContext) -> Tensor:
        q, k, v = self.qkv(x, batch.stored)
        return self.attend(q, k, v, batch)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: BatchContext) -> Tensor:
        heads = self.options.heads
        shared = (self.options.kv_heads or heads, heads, batch.axes.tensor)
        q = q.unflatten(-1, (-1, self.head_dim))
        k, v = own_groups(k, *shared), own_groups(v, *shared)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.options.rope is not None:
            turning = self.options.rope.channels or self.head_dim
            cos, sin = rotation(self.options.rope, batch.positions, turning)
            q, k = (rotate(t, cos, sin, self.options.kernel) for t in (q, k))
            v = v.contiguous()  # a view would keep the joined q, k and v for the backward pass
        result: Tensor = self.out(self.over_rows(q, k, v, batch).flatten(2))
        return result

    def over_rows(self, q: Tensor, k: Tensor, v: Tensor, batch: BatchContext) -> Tensor:
        """q [rows, part, heads, dim], k and v [rows, part, kv_heads, dim] → like q: all that needs
        other tokens, in the form of the context axis."""
        axis = batch.axes.context
        if axis.size > 1 and batch.axes.attention == "ring":
            own = batch.documents
            return self.ring(q, k, v, None if own is None else own.whole, axis)
        whole = batch.whole(q.shape[1])
        q, k, v = to_heads(q, k, v, axis)
        return from_heads(self.whole_rows(q, k, v, whole), axis)

    def ring(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, axis: Axis
    ) -> Tensor:
        """Attention of this rank's part of the rows; `documents` are those of whole rows."""
        window = self.options.window
        if window is None and applies(self.options.kernel, q):
            return ring_flash_attention(q, k, v, documents, axis, scale=self.scale)
        zigzag, device = Zigzag(q.shape[1], axis), q.device
        first = None
        if documents is not None:
            key = ("tiles", window, q.shape[1], axis.rank, axis.size)
            first = documents.kept(
                key,
                lambda host: FirstKeys.build(reach(host.positions, window), zigzag).to(device),
            )
        elif window is not None:
            first = FirstKeys.of_window(window, zigzag, device)
        return ring_attention(q, k, v, first, zigzag, scale=self.scale)

    def whole_rows(self, q: Tensor, k: Tensor, v: Tensor, batch: BatchContext) -> Tensor:
        if batch.state is not None:
            k, v = remember(k, v, batch.state)
        documents = batch.documents if batch.state is None else None
        if documents is not None and applies(self.options.kernel, q):
            window = self.options.window
            spans = documents.spans()
            return packed_attention(q, k, v, spans, scale=self.scale, window=window)
        if documents is None or is_compiling():
            return self.product(q, k, v, visible(batch, q.shape[1], self.options.window))
        # One document per row: plain causal attention never sees the padding at the end.
        buckets = documents.buckets()
        qkv = zip(buckets.spread(q), buckets.spread(k), buckets.spread(v), strict=True)
        return buckets.collect([self.alone(*bucket) for bucket in qkv], len(q))

    def alone(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
        return self.product(
            q, k, v, visible(BatchContext(positions), q.shape[1], self.options.window)
        )

    def product(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return y.transpose(1, 2)

    def untraced(self, axes: Axes, device: torch.device) -> str | None:
        ring = axes.context.size > 1 and axes.attention == "ring"
        return "ring attention (layout.attention=a2a can be compiled)" if ring else None

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.qkv)
        init.output(self.out)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                init.norm(norm)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        return {**outputs("qkv", self.qkv), **inputs("out")}

    def flops(self, length: int) -> dict[str, float]:
        # All pairs of the row, as plain torch computes them; skipping masked ones halves this.
        return {"attention": 4.0 * length * self.head_dim * self.options.heads}


def remember(k: Tensor, v: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Append keys and values to the cache. Return all of them so far."""
    end = state.seen + k.shape[1]
    assert end <= state.capacity, "the sequence fits into the cache"
    for name, new in (("keys", k), ("values", v)):
        if name not in state.tensors:
            shape = (new.shape[0], state.capacity, *new.shape[2:])
            state.tensors[name] = new.new_zeros(shape)
        state.tensors[name][:, state.seen : end] = new
    return state.tensors["keys"][:, :end], state.tensors["values"][:, :end]


def reach(positions: Tensor, window: int | None) -> Tensor:
    """int64 [rows or 1, length]: number of earlier keys that each query sees."""
    return positions if window is None else positions.clamp(max=window - 1)


def visible(batch: BatchContext, queries: int, window: int | None) -> Tensor | None:
    """bool [rows or 1, 1, queries, keys], or None for plain causal attention."""
    seen = batch.state.seen if batch.state else 0
    if batch.documents is None and not seen and (window is None or window >= queries):
        return None
    past = reach(batch.positions, window)
    key = torch.arange(seen + queries, device=past.device)
    query = key[seen:, None]
    return ((key <= query) & (key >= query - past[..., None])).unsqueeze(1)
