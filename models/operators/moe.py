"""Mixture of experts: a router sends each token to a few MLPs among many.

softmax     p = softmax(x·W); the k largest. With k = 1 the weight is p itself (Switch); with more,
            the weights are scaled to sum to one (Mixtral); `normalize` overrides this
sigmoid     p = sigmoid(x·W + b); the largest (BlackMamba). In training, Sinkhorn's iteration
            on exp(2·logits) makes the choice, so that experts get equally many tokens

y = Σ_chosen p_e · (act(x·W_gate,e) ⊙ x·W_up,e)·W_down,e + shared(x)

DeepSeek V3 chooses by p + c, where the correction c is no weight that a gradient trains: after each
step it moves by the signs of the loads' errors (model/load_balance.py).

Experts are balanced over each row by itself, so the model does not depend on how rows are divided
into micro-batches or among ranks. `balance_over: micro-batch` gives that up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.options.mlp import GLUOptions, MLPOptions
from ..config.options.moe import MoEOptions
from ..config.precision import widen
from ..layers.grouped import add_grouped_bias, group_ends, grouped_product
from ..layers.initializers import Initializers
from ..layers.routed_rows import combine, dispatch, sort_choices
from ..layers.routing import (
    SINKHORN_ROUNDS,
    balance_loss,
    count_visits,
    mask_groups,
    sinkhorn,
    within_capacity,
)
from ..parallel.axes import Axes
from ..parallel.experts import ExpertExchange
from ..parallel.local_shard import Sharded, ShardingSpec
from ..parallel.tensor import gather, reduce, scatter
from .base import BatchContext, Operator
from .mlp import ACTIVATIONS, GLU, MLP, apply_gate


class MoE(Operator):
    Options = MoEOptions
    experts = ("gate_up", "up", "down", "gate_up_bias", "up_bias", "down_bias")
    no_decay = ("gate_up_bias", "up_bias", "down_bias")
    full_precision = untrained = ("correction_bias",)
    gate_up: Tensor | None
    up: Tensor | None
    gate_up_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    correction_bias: Tensor | None

    def __init__(self, options: MoEOptions, width: int) -> None:
        super().__init__(options, width)
        experts, hidden = options.experts, options.hidden
        self.router = Router(width, experts, bias=options.has_router_bias, fp32=options.router_fp32)
        rows = {"gate_up": 2 * hidden, "up": hidden}
        for name, used in (("gate_up", options.gated), ("up", not options.gated)):
            weight, bias = torch.empty(experts, rows[name], width), torch.empty(experts, rows[name])
            self.register_parameter(name, nn.Parameter(weight) if used else None)
            biased = used and options.bias
            self.register_parameter(f"{name}_bias", nn.Parameter(bias) if biased else None)
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        down_bias = nn.Parameter(torch.empty(experts, width)) if options.bias else None
        self.register_parameter("down_bias", down_bias)
        correction = nn.Parameter(torch.empty(experts), requires_grad=False)
        balances = options.bias_update_rate is not None
        self.register_parameter("correction_bias", correction if balances else None)
        self.shared = _build_shared(options, width)
        self.shared_gate = nn.Linear(width, 1, bias=False) if options.shared_gate else None
        self.sinkhorn_rounds = SINKHORN_ROUNDS

    def forward(self, x: Tensor, batch: BatchContext) -> Tensor:
        """Map x [b, t, width] to [b, t, width]."""
        options, kernel = self.options, self.options.kernel
        tokens, axis = x.flatten(0, 1), batch.axes.experts
        logits = widen(self.router(tokens)).unflatten(0, x.shape[:2])
        expert_ids, weights = self.route(logits, batch)
        if batch.routed is not None:
            text_mask = self.text_mask(logits, batch).unsqueeze(-1)
            visits = count_visits(expert_ids, options.experts) * text_mask
            batch.routed.append(visits.sum(dim=(0, 1)))
        drops = self.training and options.capacity_factor is not None
        if drops:  # no expert has the last number: such rows come last, and none takes them
            kept = within_capacity(
                expert_ids, options.experts, options.capacity_factor, batch.axes.context
            )
            expert_ids = torch.where(kept, expert_ids, options.experts)
            weights = torch.where(kept, weights, 0)
        expert_ids, weights = expert_ids.flatten(0, 1), weights.flatten(0, 1)
        row_ids = sort_choices(expert_ids)
        counts = count_visits(expert_ids, options.experts).sum(dim=0)
        exchange = ExpertExchange(counts, axis, drops=drops)
        rows = exchange.dispatch(dispatch(tokens, row_ids, kernel))
        ends = group_ends(
            exchange.counts, rows, self.inner, self.down, on_host=exchange.host_counts
        )
        y = exchange.combine(self.apply_experts(rows, ends, batch.axes.tensor.size))
        if axis.size > 1:
            batch.received.append(exchange.received)
        y = combine(y, row_ids, weights, kernel)
        # Not a view: FSDP2 warns of modules that return views.
        out: Tensor = torch.ops.aten._unsafe_view(y, x.shape)
        return out if self.shared is None else out + self.apply_shared(x, batch)

    @property
    def inner(self) -> Tensor:
        """The experts' first matrices [experts, channels, width]."""
        weight = self.gate_up if self.options.gated else self.up
        assert weight is not None
        return weight

    def apply_experts(self, rows: Tensor, ends: Tensor, ranks: int) -> Tensor:
        """Return the experts' outputs for rows [number, width], sorted by expert. If tensor
        parallelism cuts the hidden channels, each of its ranks adds bias / ranks."""
        options = self.options
        hidden = grouped_product(rows, self.inner, ends)
        bias = self.gate_up_bias if options.gated else self.up_bias
        if bias is not None:
            hidden = add_grouped_bias(hidden, bias, ends)
        if options.gated:
            clamps = {"limit": options.glu_limit, "offset": options.glu_offset}
            hidden = apply_gate(hidden, options.activation, options.kernel, **clamps)
        else:
            hidden = ACTIVATIONS[options.activation](hidden)
        y = grouped_product(hidden, self.down, ends)
        return y if self.down_bias is None else add_grouped_bias(y, self.down_bias / ranks, ends)

    def apply_shared(self, x: Tensor, batch: BatchContext) -> Tensor:
        """Return the shared expert's output for x [b, t, width]. Where each tensor-parallel rank
        has a part of the tokens for the experts, all have all tokens here, and some channels."""
        assert self.shared is not None
        axis = batch.axes.gathered
        y = scatter(self.shared(gather(x, axis), batch), axis)
        return y if self.shared_gate is None else y * self.shared_gate(x).sigmoid()

    def route(self, logits: Tensor, batch: BatchContext) -> tuple[Tensor, Tensor]:
        """Return expert_ids and weights [rows, length, k] for logits [rows, length, experts]."""
        options, axis = self.options, batch.axes.context
        softmax = options.router == "softmax"
        probs = logits.softmax(dim=-1) if softmax else logits.sigmoid()
        choice_probs = probs
        text_mask = self.text_mask(logits, batch)
        if options.sinkhorn and self.training:
            groups = self.balance_groups(logits.detach()), self.balance_groups(text_mask)
            balanced_probs = sinkhorn(*groups, axis, self.sinkhorn_rounds)
            choice_probs = torch.where(
                text_mask.unsqueeze(-1), balanced_probs.view_as(logits), probs
            )
        if self.correction_bias is not None:
            choice_probs = choice_probs + self.correction_bias
        if options.groups > 1:
            choice_probs = mask_groups(choice_probs, options.groups, options.top_k_groups)
        expert_ids = choice_probs.topk(options.top_k, dim=-1).indices
        weights = probs.gather(-1, expert_ids)
        if options.normalizes:
            weights = weights / _nonzero(weights.sum(dim=-1, keepdim=True), softmax)
        if options.routed_scaling_factor != 1:
            weights = weights * options.routed_scaling_factor
        if self.training and options.balance_loss:
            if not softmax:
                probs = probs / _nonzero(probs.sum(dim=-1, keepdim=True), softmax)
            imbalance = balance_loss(
                self.balance_groups(probs),
                self.balance_groups(expert_ids),
                self.balance_groups(text_mask),
                axis,
            )
            batch.losses.append(options.balance_loss * imbalance.expand(len(logits)))
        if self.training and options.z_loss:
            squared_log_z = reduce(logits.logsumexp(dim=-1).square().sum(dim=1), axis)
            batch.losses.append(options.z_loss / (logits.shape[1] * axis.size) * squared_log_z)
        return expert_ids, weights

    def balance_groups(self, x: Tensor) -> Tensor:
        """Map x [rows, length, …] to [groups, tokens, …]: tokens that are balanced together."""
        return x if self.options.balance_over == "row" else x.flatten(0, 1).unsqueeze(0)

    def text_mask(self, logits: Tensor, batch: BatchContext) -> Tensor:
        """Return bool [rows, length]: False in padding rows."""
        mask = logits.new_ones(logits.shape[:2], dtype=torch.bool)
        return mask if batch.rows is None else mask & batch.rows.unsqueeze(1)

    def untraced(self, axes: Axes, device: torch.device) -> str | None:
        sharded = axes.experts.size > 1
        return "the exchange of rows with experts of other ranks" if sharded else None

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.router)
        init.matrix(self.inner)
        init.output_matrix(self.down)
        for name in (*self.no_decay, *self.untrained):
            if (bias := getattr(self, name)) is not None:
                init.constant(bias, 0.0)
        if self.shared is not None:
            self.shared.init_weights(init)
        if self.shared_gate is not None:
            init.linear(self.shared_gate)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard each expert by its hidden channels: all ranks route all tokens, identically. (Under
        expert parallelism, each rank routes its own tokens, and experts are whole.)"""
        halves = Sharded(1, (self.options.hidden, self.options.hidden))
        inner = {"gate_up": halves, "gate_up_bias": halves, "up": Sharded(1), "up_bias": Sharded(1)}
        return {**inner, "down": Sharded(2)}

    def stacks(self) -> dict[str, tuple[int, ...]]:
        hidden = self.options.hidden
        inner = {"gate_up": (hidden, hidden)} if self.options.gated else {"up": (hidden,)}
        return {**inner, "down": (self.width,)}

    def expert_parameters(self) -> int:
        """Count the parameters of an expert."""
        parameters = (getattr(self, name) for name in self.experts)
        return sum(parameter[0].numel() for parameter in parameters if parameter is not None)

    def unused_parameters(self) -> int:
        num_unused: int = self.options.experts - self.options.top_k
        return num_unused * self.expert_parameters()

    def flops(self, length: int) -> dict[str, float]:
        weights = self.inner[0].numel() + self.down[0].numel()
        return {"experts": 2.0 * self.options.top_k * weights}


class Router(nn.Linear):
    """Scores of the experts."""

    def __init__(self, width: int, experts: int, *, bias: bool, fp32: bool) -> None:
        super().__init__(width, experts, bias=bias)
        self.fp32 = fp32
        """Compute in fp32 or wider, whatever the precision of x and of the weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [tokens, width] to [tokens, experts]."""
        if not self.fp32:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else widen(self.bias)
            return F.linear(widen(x), widen(self.weight), bias)


def _build_shared(options: MoEOptions, width: int) -> GLU | MLP | None:
    if options.shared_hidden is None:
        return None
    activation, kernel = options.activation, options.kernel
    if options.gated:
        glu = GLUOptions(hidden=options.shared_hidden, activation=activation, kernel=kernel)
        return GLU(glu, width)
    return MLP(MLPOptions(hidden=options.shared_hidden, activation=activation), width)


def _nonzero(total: Tensor, softmax: bool) -> Tensor:
    """Keep a sum of weights above 0: those of a sigmoid may all be 0."""
    return total if softmax else total + 1e-20
