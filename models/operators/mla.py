"""Multi-head latent attention: keys and values of all heads come from one small vector per token.

    c = RMSNorm(x·W_kv_a),  r = rope(x·W_r)                 kept for each token, shared by all heads
    q = [rope(q_r), q_n],   q_r, q_n = RMSNorm(x·W_q_a)·W_q_b          (or x·W_q)
    k = [r, c·W_k],  v = c·W_v,   y = softmax(q·kᵀ·scale)·v·W_o

A whole pass expands c to keys and values, and is attention with as many heads of keys. Context
ranks send c and r, if that is less: those that exchange heads to all of them, and each expands them
for its heads; in a ring they travel, and each rank expands those that arrive. Generation keeps c
and r, and absorbs the expansions into queries and outputs:

    q·kᵀ = q_r·r + (q_n·W_kᵀ)·c,   y = (softmax(…)·c)·W_v

The channels that turn come first in a head, and turn in pairs (i, i + d/2); a published model with
another order has the same function after its rows are reordered.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.options.attention import AttentionOptions
from ..config.options.mla import MLAOptions
from ..layers.attention.rows import row_attention
from ..layers.initializers import Initializers
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..layers.norms import RMSNorm
from ..layers.rope import rotate, rotation
from ..parallel.axes import Axes
from ..parallel.exchange import gather_rows
from ..parallel.heads import scatter_rows_of_heads
from ..parallel.local_shard import ShardingSpec
from ..parallel.ring.circulation import Latents
from ..parallel.tensor import gather
from .attention import Attention, attention_mask
from .base import BatchContext, State


class MLA(Attention):
    Options = MLAOptions
    unrounded = ("kv_b",)

    def __init__(self, options: MLAOptions, width: int) -> None:
        heads, kernel = options.heads, options.kernel
        inner = AttentionOptions(heads=heads, head_dim=options.head_dim, kernel=kernel, rope=None)
        super().__init__(inner, width)
        del self.qkv
        self.options = options
        self.scale = options.softmax_scale or options.qk_head_dim**-0.5
        q_rank, kv_rank = options.q_lora_rank, options.kv_lora_rank
        self.q_a = nn.Linear(width, q_rank, bias=False) if q_rank else None
        self.q_a_norm = RMSNorm(q_rank, options.norm_eps, kernel=kernel) if q_rank else None
        self.q_b = SplitLinear(q_rank or width, {"q": heads * options.qk_head_dim})
        self.kv_a = nn.Linear(width, kv_rank + options.qk_rope_head_dim, bias=False)
        self.kv_a_norm = RMSNorm(kv_rank, options.norm_eps, kernel=kernel)
        parts = {"k": heads * options.qk_nope_head_dim, "v": heads * options.v_head_dim}
        self.kv_b = SplitLinear(kv_rank, parts)
        self.out = OutputLinear(heads * options.v_head_dim, width, bias=False)

    def forward(self, x: Tensor, batch: BatchContext) -> Tensor:
        """Map x [b, t, width] to [b, t, width]."""
        options = self.options
        q_input = x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))
        # q [b, t, heads, rope + nope]   latent [b, t, rank]   rope_key [b, t, 1, rope]
        q = self.q_b(q_input, joined=True).unflatten(-1, (-1, options.qk_head_dim))
        latent, rope_key = self.split_latents(self.kv_a(x))
        latent, rope_key = self.kv_a_norm(latent), rope_key.unsqueeze(2)
        if options.rope is not None:
            cos, sin = rotation(options.rope, batch.positions, options.qk_rope_head_dim)
            q, rope_key = (rotate(t, cos, sin, options.kernel) for t in (q, rope_key))
        if batch.state is not None:
            y = self.attend_cached(q, latent, rope_key, batch, batch.state)
        elif self.sends_latents(batch.axes):
            tokens = torch.cat([latent, rope_key.squeeze(2)], dim=-1)
            ring = batch.axes.attention == "ring"
            y = (self.attend_ring_of_latents if ring else self.attend_latents)(q, tokens, batch)
        else:
            k, v = self.kv_b(latent)
            k, v = self.shape_keys(k, v, rope_key)
            y = self.attend_across_ranks(self.pad(q), k, v, batch)
        out: Tensor = self.out(y[..., : options.v_head_dim].flatten(2))
        return out

    def sends_latents(self, axes: Axes) -> bool:
        tp, cp = axes.tensor.size, axes.context.size
        return cp > 1 and bool(self.options.sends_latents(axes.attention, tp, cp))

    def attend_latents(self, q: Tensor, tokens: Tensor, batch: BatchContext) -> Tensor:
        """Attend like `attend_across_ranks`: queries go to the ranks of their heads, latents, the
        `tokens` [b, t, rank + rope], to all, which expand them for their heads."""
        axis = batch.axes.context
        row_batch = batch.whole_row_context(q.shape[1])
        q = gather_rows(q, [q.shape[2] // axis.size] * axis.size, axis)
        latent, rope_key = self.split_latents(gather(tokens, axis))
        k, v = self.kv_b(latent, share=axis)
        k, v = self.shape_keys(k, v, rope_key.unsqueeze(2))
        y = self.attend_rows(self.pad(q), k, v, row_batch)
        return scatter_rows_of_heads(y[..., : self.options.v_head_dim], axis)

    def attend_ring_of_latents(self, q: Tensor, tokens: Tensor, batch: BatchContext) -> Tensor:
        """Attend like `attend_latents`, in a ring."""

        def attend(tokens: Tensor, weight: Tensor) -> Tensor:
            latents = Latents(tokens, weight, self.expand, self.options.v_head_dim)
            return self.attend_ring(self.pad(q), latents, batch)

        y: Tensor = self.kv_b(tokens, use=attend)
        return y

    def expand(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return keys and values [2, ..., heads, head_dim] from tokens [..., rank + rope] and the
        weight of `kv_b`."""
        latent, rope_key = self.split_latents(tokens)
        k, v = F.linear(latent, weight).split(list(self.kv_b.parts.values()), dim=-1)
        return torch.stack(self.shape_keys(k, v, rope_key.unsqueeze(-2)))

    def split_latents(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        latent, rope_key = tokens.split(
            [self.options.kv_lora_rank, self.options.qk_rope_head_dim], dim=-1
        )
        return latent, rope_key

    def shape_keys(self, k: Tensor, v: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [..., heads, head_dim], padded with zeros, from expansions
        [..., channels] and rope_key [..., 1, rope]."""
        k = k.unflatten(-1, (-1, self.options.qk_nope_head_dim))
        v = v.unflatten(-1, (-1, self.options.v_head_dim))
        k = torch.cat([rope_key.expand(*k.shape[:-1], -1), k], dim=-1)
        return self.pad(k), self.pad(v)

    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self.options.head_dim - x.shape[-1]))

    def attend_cached(
        self, q: Tensor, latent: Tensor, rope_key: Tensor, batch: BatchContext, state: State
    ) -> Tensor:
        """Attend to all tokens that `state` has seen and to those of this call, which it takes up.
        The first call expands its latents; later ones absorb the expansions."""
        new_tokens, options = torch.cat([rope_key.squeeze(2), latent], dim=-1), self.options
        mask = attention_mask(batch, q.shape[1], None)
        seen = append_latents(new_tokens, state)
        if not state.seen:
            k, v = self.kv_b(latent)
            k, v = self.shape_keys(k, v, rope_key)
            return self.masked_attention(self.pad(q), k, v, mask)
        q_rope, q_nope = q.split([options.qk_rope_head_dim, options.qk_nope_head_dim], dim=-1)
        rows = list(self.kv_b.parts.values())
        k_rows, v_rows = self.kv_b.weight.split(rows)
        k_rows = k_rows.unflatten(0, (-1, options.qk_nope_head_dim))
        v_rows = v_rows.unflatten(0, (-1, options.v_head_dim))
        q = torch.cat([q_rope, torch.einsum("bthn,hnr->bthr", q_nope, k_rows)], dim=-1)
        keys = seen.unsqueeze(2).expand(-1, -1, q.shape[2], -1)
        attended = row_attention(q, keys, keys, mask, scale=self.scale)
        mean_latent = attended[..., options.qk_rope_head_dim :]
        return torch.einsum("bthr,hvr->bthv", mean_latent, v_rows)

    def init_weights(self, init: Initializers) -> None:
        for linear in (self.q_a, self.q_b, self.kv_a, self.kv_b):
            if linear is not None:
                init.linear(linear)
        for norm in (self.q_a_norm, self.kv_a_norm):
            if norm is not None:
                init.norm(norm)
        init.output(self.out)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard by heads: all ranks compute all latents."""
        return {**outputs("q_b", self.q_b), **outputs("kv_b", self.kv_b), **inputs("out")}

    def flops(self, length: int) -> dict[str, float]:
        # All pairs of the row, without the padding of heads.
        channels = self.options.qk_head_dim + self.options.v_head_dim
        return {"attention": 2.0 * length * channels * self.options.heads}

    def step_flops(self, seen: int) -> dict[str, float]:
        # The expansions of keys and values cost as much where they are absorbed.
        channels = self.options.kv_lora_rank + self.options.qk_rope_head_dim
        return {"attention": 4.0 * seen * channels * self.options.heads}


def append_latents(new_tokens: Tensor, state: State) -> Tensor:
    """Append new_tokens [rows, new, channels] to the cache; return those of all tokens."""
    end = state.seen + new_tokens.shape[1]
    assert end <= state.capacity, "the sequence fits into the cache"
    if "latents" not in state.tensors:
        shape = (len(new_tokens), state.capacity, new_tokens.shape[2])
        state.tensors["latents"] = new_tokens.new_zeros(shape)
    state.tensors["latents"][:, state.seen : end] = new_tokens
    return state.tensors["latents"][:, :end]
