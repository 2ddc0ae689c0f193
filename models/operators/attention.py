"""Attention: softmax(q·kᵀ/√d)·v over the document's past; query heads may share keys and values.

With an output gate, the heads' outputs are multiplied by sigmoid(x·W_gate), channel by channel or
head by head. A sink is a score of a
head that counts in its softmax, and has no value.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..config.options.attention import AttentionOptions
from ..config.options.base import OperatorOptions
from ..layers.attention.limits import AttentionCall
from ..layers.attention.packed import packed_attention, supports_packed_attention
from ..layers.attention.ring_flash import ring_flash_attention
from ..layers.attention.rows import row_attention
from ..layers.initializers import Initializers
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..layers.norms import RMSNorm, norm_divided
from ..layers.rope import rotate, rotation
from ..parallel.axes import Axes
from ..parallel.heads import gather_rows_of_heads, scatter_rows_of_heads
from ..parallel.local_shard import Sharded, ShardingSpec
from ..parallel.ring.attention import FirstKeys, ring_attention
from ..parallel.ring.circulation import KeysAndValues, Latents
from ..parallel.ring.zigzag import Zigzag
from ..parallel.tensor import select_local_groups
from .base import BatchContext, Operator, State


class Attention(Operator):
    Options: ClassVar[type[OperatorOptions]] = AttentionOptions

    def __init__(self, options: AttentionOptions, width: int, input_width: int = 0) -> None:
        """`input_width` 0 means `width`."""
        super().__init__(options, width)
        self.head_dim = head_dim = options.dim(input_width or width)
        kv_width = head_dim * (options.kv_heads or options.heads)
        widths = {"q": head_dim * options.heads, "k": kv_width, "v": kv_width}
        self.gates_heads = options.output_gate_per == "head"
        if options.output_gate:
            widths["gate"] = options.heads if self.gates_heads else widths["q"]
        # FP8 takes rows by 16, and there may be fewer heads.
        wide = ("gate",) if self.gates_heads else ()
        self.qkv = SplitLinear(input_width or width, widths, bias=options.qkv_bias, wide=wide)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.over_heads = options.qk_norm_over == "projection"
        if options.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(
                    widths[part] if self.over_heads else head_dim,
                    options.qk_norm_eps,
                    zero_centered=options.qk_norm_kind == "rms-zero-centered",
                    kernel=options.kernel,
                )
                for part in "qk"
            )
        self.out = OutputLinear(head_dim * options.heads, width, bias=options.output_bias)
        self.sinks = nn.Parameter(torch.empty(options.heads)) if options.sinks else None
        self.scale = options.softmax_scale or head_dim**-0.5

    def forward(self, x: Tensor, batch: BatchContext) -> Tensor:
        """Map x [b, t, width] to [b, t, width]."""
        # q [b, t, heads·head_dim]   k, v [b, t, kv_heads·head_dim], of this rank
        q, k, v, *gate = self.qkv(x, batch.stored)
        return self.attend(q, k, v, batch, *gate)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: BatchContext, gate: Tensor | None = None
    ) -> Tensor:
        """Return out(softmax(q·kᵀ/√d)·v) [b, t, width] from q, k and v as in `forward`; `gate` is
        like q, or [b, t, heads]."""
        num_heads, axis = self.options.heads, batch.axes.tensor
        group_layout = (self.options.kv_heads or num_heads, num_heads, axis)
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None and self.over_heads:
            q, k = norm_divided((q_norm, k_norm), (q, k), axis)
        q = q.unflatten(-1, (-1, self.head_dim))
        k, v = select_local_groups(k, *group_layout), select_local_groups(v, *group_layout)
        if q_norm is not None and k_norm is not None and not self.over_heads:
            q, k = q_norm(q), k_norm(k)
        if self.options.rope is not None:
            rope, num_channels = self.options.rope, self.options.rope.channels or self.head_dim
            cos, sin = batch.derive(
                (rope, num_channels), lambda positions: rotation(rope, positions, num_channels)
            )
            q, k = (rotate(t, cos, sin, self.options.kernel) for t in (q, k))
            v = v.contiguous()  # a view would keep the joined q, k and v for the backward pass
        attended = self.attend_across_ranks(q, k, v, batch)
        if gate is not None and self.gates_heads:
            attended = attended * gate.sigmoid().unsqueeze(-1)
        attended = attended.flatten(2)
        if gate is not None and not self.gates_heads:
            attended = attended * gate.sigmoid()
        out: Tensor = self.out(attended)
        return out

    def attend_across_ranks(self, q: Tensor, k: Tensor, v: Tensor, batch: BatchContext) -> Tensor:
        """Return softmax(q·kᵀ·scale)·v like q, over the tokens on all context-parallel ranks.

        q [rows, local_length, heads, head_dim], k and v [rows, local_length, kv_heads, head_dim],
        for this rank's tokens.
        """
        axis = batch.axes.context
        if axis.size > 1 and batch.axes.attention == "ring":
            return self.attend_ring(q, KeysAndValues(k, v), batch)
        row_batch = batch.whole_row_context(q.shape[1])
        q, k, v = gather_rows_of_heads(q, k, v, axis)
        sinks = None if self.sinks is None else self.sinks[axis.part(len(self.sinks))]
        return scatter_rows_of_heads(self.attend_rows(q, k, v, row_batch, sinks), axis)

    def attend_ring(self, q: Tensor, keys: KeysAndValues | Latents, batch: BatchContext) -> Tensor:
        """Compute ring attention for this rank's tokens, with shapes as in
        `attend_across_ranks`."""
        window, axis = self.options.window, batch.axes.context
        documents = None if batch.documents is None else batch.documents.full_rows
        if (
            window is None
            and self.sinks is None
            and supports_packed_attention(self.options.kernel, q)
        ):
            return ring_flash_attention(q, keys, documents, axis, scale=self.scale)
        zigzag, device = Zigzag(q.shape[1], axis), q.device
        first_keys = None
        if documents is not None:
            key = ("tiles", window, q.shape[1], axis.rank, axis.size)
            first_keys = documents.get_or_build(
                key,
                lambda host: FirstKeys.build(count_visible(host.positions, window), zigzag).to(
                    device
                ),
            )
        elif window is not None:
            first_keys = FirstKeys.build_window(window, zigzag, device)
        return ring_attention(q, keys, first_keys, zigzag, scale=self.scale, sinks=self.sinks)

    def attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, batch: BatchContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend within whole rows: q [rows, length, heads, head_dim], k and v with kv_heads, sinks
        [heads]."""
        if batch.state is not None:
            k, v = append_to_cache(k, v, batch.state)
        documents = batch.documents if batch.state is None else None
        packs = sinks is None and supports_packed_attention(self.options.kernel, q)
        if documents is not None and packs:
            window = self.options.window
            spans = documents.spans()
            return packed_attention(q, k, v, spans, scale=self.scale, window=window)
        if documents is None or is_compiling():
            mask = attention_mask(batch, q.shape[1], self.options.window)
            return self.masked_attention(q, k, v, mask, sinks)
        # One document per row: plain causal attention never sees the padding at the end.
        buckets = documents.buckets()
        qkv = zip(buckets.spread(q), buckets.spread(k), buckets.spread(v), strict=True)
        return buckets.collect([self.attend_document(*bucket, sinks) for bucket in qkv], len(q))

    def attend_document(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend causally in rows that hold a single document: q [rows, length, heads, head_dim],
        k, v with kv_heads."""
        positions = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
        mask = attention_mask(BatchContext(positions), q.shape[1], self.options.window)
        return self.masked_attention(q, k, v, mask, sinks)

    def masked_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Return attention like q [rows, queries, heads, head_dim]; k, v [rows, keys, kv_heads,
        head_dim], mask [rows or 1, 1, queries, keys] or None for causal attention."""
        return row_attention(q, k, v, mask, scale=self.scale, sinks=sinks)

    def attention_call(self, dtype: torch.dtype) -> AttentionCall:
        heads = self.options.heads
        return AttentionCall(
            heads=heads,
            kv_heads=self.options.kv_heads or heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            window=self.options.window,
            scale=self.scale,
            dtype=str(dtype).removeprefix("torch."),
            packed=self.options.kernel != "torch" and self.sinks is None,
        )

    def untraced(self, axes: Axes, device: torch.device) -> str | None:
        ring = axes.context.size > 1 and axes.attention == "ring"
        return "ring attention (layout.attention=a2a can be compiled)" if ring else None

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.qkv)
        init.output(self.out)
        if self.sinks is not None:
            init.constant(self.sinks, 0.0)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                init.norm(norm)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        norms = ("q_norm.weight", "k_norm.weight") if self.q_norm and self.over_heads else ()
        sinks = () if self.sinks is None else ("sinks",)
        sharded = dict.fromkeys((*norms, *sinks), Sharded(0))
        return {**outputs("qkv", self.qkv), **inputs("out"), **sharded}

    def flops(self, length: int) -> dict[str, float]:
        # All pairs of the row, as plain torch computes them; skipping masked ones halves this.
        return {"attention": 4.0 * length * self.head_dim * self.options.heads}


def append_to_cache(k: Tensor, v: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Append k and v [rows, new, kv_heads, head_dim] to the cache; return all keys and values,
    [rows, seen + new, kv_heads, head_dim]."""
    end = state.seen + k.shape[1]
    assert end <= state.capacity, "the sequence fits into the cache"
    for name, new_tensor in (("keys", k), ("values", v)):
        if name not in state.tensors:
            shape = (new_tensor.shape[0], state.capacity, *new_tensor.shape[2:])
            state.tensors[name] = new_tensor.new_zeros(shape)
        state.tensors[name][:, state.seen : end] = new_tensor
    return state.tensors["keys"][:, :end], state.tensors["values"][:, :end]


def count_visible(positions: Tensor, window: int | None) -> Tensor:
    """Count the earlier keys that each query sees, int64 [rows or 1, length]."""
    return positions if window is None else positions.clamp(max=window - 1)


def attention_mask(batch: BatchContext, num_queries: int, window: int | None) -> Tensor | None:
    """Return bool [rows or 1, 1, queries, keys], or None for plain causal attention."""
    num_cached = batch.state.seen if batch.state else 0
    if batch.documents is None and not num_cached and (window is None or window >= num_queries):
        return None
    num_visible = count_visible(batch.positions, window)
    key = torch.arange(num_cached + num_queries, device=num_visible.device)
    query = key[num_cached:, None]
    return ((key <= query) & (key >= query - num_visible[..., None])).unsqueeze(1)
