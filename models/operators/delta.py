"""Gated DeltaNet and Kimi Delta Attention: a linear attention that overwrites what keys hold.

q, k, v, z, a, b = split(u·W)               q, k, v ← silu(conv4(q, k, v)), then q, k ← q/|q|, k/|k|
S_t = Diag(e^{g_t})·S_{t−1} + k_t⊗d_t       g = −exp(A_log)·softplus(a + dt_bias), β = sigmoid(b)
d_t = β_t·(v_t − (Diag(e^{g_t})·S_{t−1})ᵀ·k_t)
y_t = S_tᵀ·q_t/√key_dim                     out = (RMSNorm(y) ⊙ silu(z))·W_out

One decay for a state makes gated DeltaNet, one for each key channel KDA, which projects to decays
and gates through few channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.options.delta import DeltaOptions
from ..config.precision import widen
from ..layers.delta.rule import score_flops
from ..layers.delta.scan import delta_scan
from ..layers.initializers import Initializers
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..layers.norms import RMSNorm
from ..parallel.axes import Axis
from ..parallel.heads import gather_rows_of_states, scatter_rows_of_heads
from ..parallel.local_shard import Sharded, ShardingSpec
from ..parallel.tensor import gather, select_local_groups
from .base import BatchContext, Operator
from .mamba2 import init_dt_bias
from .short_conv import ShortConvolution

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
LOWEST_RATES = {"head": 0.01, "channel": 1.0}
"""Lower bounds of the initial exp(A_log), as published."""


class Delta(Operator):
    Options = DeltaOptions
    full_precision = ("dt_bias", "A_log")

    def __init__(self, options: DeltaOptions, width: int) -> None:
        super().__init__(options, width)
        key_width = options.heads * options.key_head_dim
        value_width = options.state_heads * options.value_head_dim
        decays = options.state_heads * options.decays
        widths = {"q": key_width, "k": key_width, "v": value_width}
        if options.gate is not None:
            widths["gate"] = options.gate_rank or value_width
        widths |= {"decay": options.decay_rank or decays, "beta": options.state_heads}
        # Decays and β select what a state holds: they stay out of FP8.
        self.input = SplitLinear(width, widths, wide=("decay", "beta"))
        self.conv = ShortConvolution(2 * key_width + value_width, options.conv, bias=False)
        self.decay_up = self.gate_up = None
        if options.decay_rank is not None:
            self.decay_up = SplitLinear(options.decay_rank, {"decay": decays}, wide=("decay",))
        if options.gate_rank is not None:
            self.gate_up = SplitLinear(options.gate_rank, {"gate": value_width})
        self.dt_bias = nn.Parameter(torch.empty(decays))
        self.A_log = nn.Parameter(torch.empty(options.state_heads))
        self.norm = RMSNorm(options.value_head_dim, options.norm_eps, kernel=options.own_kernel)
        self.output = OutputLinear(value_width, width, bias=False)

    def forward(self, u: Tensor, batch: BatchContext) -> Tensor:
        """Map u [b, t, width] to the same shape."""
        options, tp = self.options, batch.axes.tensor
        *qkv_widths, decay_width, beta_width = self.input.parts.values()
        gate_widths = qkv_widths[3:]
        sizes = [sum(qkv_widths[:3]), *gate_widths, decay_width, beta_width]
        # qkv [b, t, 2·heads·key_dim + states·value_dim]   beta [b, t, states], of this rank
        qkv, *gates, decay, beta = self.input(u, batch.stored, sizes=sizes)
        qkv = self.conv(qkv, batch, silu=True, kernel=options.own_kernel)
        if options.heads % tp.size:  # the value heads of a rank share keys with those of others
            *qk, v = qkv.split(qkv_widths[:3], dim=-1)
            local_qk = (
                select_local_groups(x, options.heads, options.state_heads, tp).flatten(-2)
                for x in qk
            )
            qkv = torch.cat([*local_qk, v], dim=-1)
        decay = project_up(decay, self.decay_up, tp)
        if batch.axes.context.size > 1 and batch.axes.delta == "a2a":
            y = self.scan_whole_rows(qkv, decay, beta, batch)
        else:
            y = self.scan(qkv, decay, beta, self.A_log, self.dt_bias, batch)
        normed = self.norm(y).flatten(2)
        if gates:
            gate = widen(project_up(gates[0], self.gate_up, tp))
            normed = (normed * GATES[options.gate](gate)).to(u.dtype)
        out: Tensor = self.output(normed)
        return out

    def scan(
        self,
        qkv: Tensor,
        decay: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        batch: BatchContext,
    ) -> Tensor:
        """Return y [b, t, states, value_dim], with shapes as in `delta_scan`."""
        options = self.options
        # In generation, the state S [b, states, key_dim, value_dim] goes on from the last call.
        cache = batch.state.tensors if batch.state is not None else {}
        y, cache["delta"] = delta_scan(
            qkv,
            decay,
            beta,
            A_log,
            dt_bias,
            batch.documents,
            key_head_dim=options.key_head_dim,
            value_head_dim=options.value_head_dim,
            max_beta=options.max_beta,
            qk_norm=options.qk_norm,
            state=cache.get("delta"),
            axis=batch.axes.context,
            chunk=options.chunk,
            kernel="torch" if batch.state is not None else options.kernel,
        )
        return y

    def scan_whole_rows(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, batch: BatchContext
    ) -> Tensor:
        """Return y of this rank's tokens like `scan`: each rank scans whole rows of some heads."""
        options, axis = self.options, batch.axes.context
        heads = axis.part(len(self.A_log))
        decays = slice(heads.start * options.decays, heads.stop * options.decays)
        qkv, decay, beta = gather_rows_of_states(
            qkv,
            decay,
            beta,
            axis,
            key_head_dim=options.key_head_dim,
            value_head_dim=options.value_head_dim,
        )
        whole_rows = batch.whole_row_context(beta.shape[1] // axis.size)
        y = self.scan(qkv, decay, beta, self.A_log[heads], self.dt_bias[decays], whole_rows)
        return scatter_rows_of_heads(y, axis)

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.input)
        self.conv.init_weights(init)
        for linear in (self.decay_up, self.gate_up):
            if linear is not None:
                init.linear(linear)
        init_dt_bias(self.dt_bias, init)
        init.uniform(self.A_log, LOWEST_RATES[self.options.decay], 16, torch.log)
        init.norm(self.norm)
        init.output(self.output)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard by heads. q, k and the channels between two projections are sharded evenly, and
        gathered where heads need them."""
        widths = self.input.parts
        spec = {
            **outputs("input", self.input),
            "conv.taps": Sharded(0, (widths["q"], widths["k"], widths["v"])),
            **dict.fromkeys(("dt_bias", "A_log"), Sharded(0)),
            **inputs("output"),
        }
        for name in ("decay_up", "gate_up"):
            if (linear := getattr(self, name)) is not None:
                spec |= outputs(name, linear)
        return spec

    def flops(self, length: int) -> dict[str, float]:
        """Count the chunked rule's FLOPs per token: scores of keys and of queries, the triangular
        system, scores · D, and the states' products."""
        options = self.options
        chunk, states = min(options.chunk, length), options.state_heads
        key_dim, value_dim = options.key_head_dim, options.value_head_dim
        scored = options.heads if options.decay == "head" else states
        scores = 2 * scored * score_flops(chunk, key_dim, by_channel=options.decay == "channel")
        system = chunk * (key_dim + value_dim)
        return {
            "convolution": 2.0 * self.conv.taps.numel(),
            "scan": scores
            + states * (system + 2.0 * chunk * value_dim + 6.0 * key_dim * value_dim),
        }

    def step_flops(self, seen: int) -> dict[str, float]:
        """Count the recurrence's FLOPs per token: 7 per state element (decay, prediction, new
        value, output)."""
        options = self.options
        state_numbers = options.state_heads * options.key_head_dim * options.value_head_dim
        return {"convolution": 2.0 * self.conv.taps.numel(), "scan": 7.0 * state_numbers}


def project_up(x: Tensor, linear: SplitLinear | None, tp: Axis) -> Tensor:
    """Return this rank's decays or gates [b, t, channels] from this rank's channels of a low-rank
    projection, or x if there is none."""
    if linear is None:
        return x
    y: Tensor = linear(gather(x, tp, dim=-1), joined=True)
    return y
