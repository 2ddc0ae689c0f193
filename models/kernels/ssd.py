"""Mamba-2's scan (SSD): matrix products within token chunks, and a state from chunk to chunk.

    S_t = exp(Δ_t·A)·S_{t−1} + Δ_t·x_t⊗B_t,  y_t = S_t·C_t + D·x_t
    Δ = softplus(dt + dt_bias),  A = −exp(A_log)

A program walks along one head's CHUNKS chunks with the state in registers; memory holds the states
at the boundaries of these spans alone. The summary pass computes each span's contribution to the
state, a scan over the spans turns the contributions into the states at the boundaries, and a second
pass writes the outputs. The backward pass scans the state gradients from the end in the same way,
and the same programs compute dx: dy replaces x, and B and C change places. dB and dC are summed
over a group's heads before they leave a program. Decays, sums and the scan are fp32; in bf16 and
fp16 the products take rounded numbers, and the states at the boundaries are rounded to the
products' dtype.

Each token in xBC holds x, B and C, so that their gradients are one tensor too; dt may be a slice of
a wider tensor. The twin is `plain` in models/layers/mixed_scan.py.

Under context parallelism the op exchanges states between a row's ranks: the states forward, and
their gradients backward, after the summary pass and before the scan over spans.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..parallel.groups import find_axis
from ..parallel.states import receive_state
from . import ssd_launch as launches
from . import ssd_next
from .layout import to_channels_last
from .op import op
from .ssd_launch import Sizes, find_sizes


def _sizes(
    xBC: Tensor, dt: Tensor, positions: Tensor | None, head_dim: int, state_size: int
) -> Sizes:
    return find_sizes(
        xBC.shape, dt.shape[2], head_dim, state_size, positions is not None,
        xBC.dtype == torch.float32, xBC.stride(), dt.stride(),
    )  # fmt: skip


@op("ssd")
def ssd(
    xBC: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    state: Tensor | None,
    positions: Tensor | None,
    head_dim: int,
    state_size: int,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y [rows, length, heads · head_dim] and the final state [rows, heads, head_dim,
    state_size]; for the backward pass, the states at span starts [rows, spans, heads, head_dim,
    state_size] and the decay over each span [rows, spans, heads].

    xBC [rows, length, heads · head_dim + 2 · groups · state_size], dt [rows, length, heads];
    dt_bias, A_log, D [heads]; state, the initial state, like the final one; positions [rows,
    length] for packed rows. `axis` names the context axis that shards the rows, or is empty.
    """
    if ssd_next.runs(xBC):
        return ssd_next.forward(
            xBC, dt, dt_bias, A_log, D, state, positions, head_dim, state_size, axis
        )
    xBC, dt = to_channels_last(xBC), to_channels_last(dt)
    sizes = _sizes(xBC, dt, positions, head_dim, state_size)
    x, B, C = xBC.split_with_sizes(sizes.widths, dim=2)
    delta, dA_cumsum = _compute_delta(dt, dt_bias, A_log, sizes)
    position_ids = delta if positions is None else positions.contiguous()
    contributions = _empty_states(delta, sizes)
    span_decays = delta.new_empty(sizes.rows, sizes.spans, sizes.heads)
    launches.bind_span_states(sizes, sizes.xBC_strides, backward=False)(
        x, B, delta, dA_cumsum, position_ids, contributions, span_decays
    )
    states = _empty_states(xBC, sizes)
    final_state = _scan_states(sizes, contributions, states, state, span_decays, axis)
    out = torch.empty(sizes.rows, sizes.length, sizes.inner, dtype=xBC.dtype, device=xBC.device)
    launches.bind_outputs(sizes, sizes.xBC_strides, out.stride()[:2], backward=False)(
        x, C, B, delta, dA_cumsum, D.contiguous(), position_ids, states, out
    )
    return out, final_state, states, span_decays


@ssd.register_fake
def _(
    xBC: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, D: Tensor, state: Tensor | None,
    positions: Tensor | None, head_dim: int, state_size: int, axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if ssd_next.runs(xBC):
        return ssd_next.forward_shapes(xBC, dt, state, head_dim, state_size, axis)
    sizes = find_sizes.__wrapped__(  # symbolic sizes are no keys
        xBC.shape, dt.shape[2], head_dim, state_size, positions is not None, fp32=False
    )
    return (
        xBC.new_empty(sizes.rows, sizes.length, sizes.inner),
        xBC.new_empty(sizes.rows, sizes.heads, head_dim, state_size, dtype=torch.float32),
        _empty_states(xBC, sizes),
        xBC.new_empty(sizes.rows, sizes.spans, sizes.heads, dtype=torch.float32),
    )


@op("ssd_backward")
def _backward(
    dy: Tensor,
    grad_final_state: Tensor | None,
    xBC: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    states: Tensor,
    span_decays: Tensor,
    positions: Tensor | None,
    head_dim: int,
    state_size: int,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients for xBC, dt, (dt_bias, A_log, D) [3, heads] and the initial state. dy is
    y's gradient; states and span_decays come from the forward pass."""
    if ssd_next.runs(xBC):
        return ssd_next.backward(
            dy, grad_final_state, xBC, dt, dt_bias, A_log, D, states, positions, head_dim,
            state_size, axis,
        )  # fmt: skip
    xBC, dt, dy = to_channels_last(xBC), to_channels_last(dt), to_channels_last(dy)
    sizes = _sizes(xBC, dt, positions, head_dim, state_size)
    x, B, C = xBC.split_with_sizes(sizes.widths, dim=2)
    delta, dA_cumsum = _compute_delta(dt, dt_bias, A_log, sizes)
    position_ids = delta if positions is None else positions.contiguous()
    (rows, heads, spans), chunks = (sizes.rows, sizes.heads, sizes.spans), sizes.chunks
    xBC_strides, dy_strides = sizes.xBC_strides, dy.stride()[:2]
    contributions = _empty_states(delta, sizes)
    spanning_pairs = delta.new_empty(rows, spans, heads, sizes.num_state_blocks)
    launches.bind_span_states(sizes, dy_strides, backward=True)(
        dy, C, delta, dA_cumsum, position_ids, contributions, span_decays
    )
    grad_states = torch.empty_like(states)
    grad_state = _scan_states(
        sizes, contributions, grad_states, grad_final_state, span_decays, axis,
        (states, spanning_pairs),
    )  # fmt: skip
    grad_xBC = torch.empty(xBC.shape, dtype=xBC.dtype, device=xBC.device)
    grad_x, grad_BC = grad_xBC.tensor_split((sizes.inner,), dim=2)
    grad_strides = grad_xBC.stride()[:2]
    launches.bind_outputs(sizes, dy_strides, grad_strides, backward=True)(
        dy, B, C, delta, dA_cumsum, D.contiguous(), position_ids, grad_states, grad_x
    )
    by_token = (heads, sizes.padded_length)
    pair_sums_t, pair_sums_s = delta.new_empty(2, rows, launches.CHUNKS, *by_token).unbind()
    D_terms, state_pairs_t, state_pairs_s = delta.new_empty(3, rows, *by_token).unbind()
    chunk, chunks_per_span = launches.CHUNK, launches.CHUNKS
    score_grads = xBC.new_empty(rows, chunks, chunks_per_span, sizes.num_blocks, chunk, chunk)
    for same_chunk in (True, False):
        launches.bind_pairs(sizes, dy_strides, same_chunk=same_chunk)(
            dy, x, B, C, delta, dA_cumsum, position_ids, pair_sums_t, pair_sums_s, D_terms,
            score_grads,
        )  # fmt: skip
    partial_shape = 2, sizes.num_blocks, rows, sizes.length, sizes.state_size
    partial_grads = delta.new_empty(partial_shape)  # of B, and of C
    for backward, values, target, source, boundary_states, state_pair_sums, value_strides, part in (
        (False, dy, C, B, states, state_pairs_t, dy_strides, 1),
        (True, x, B, C, grad_states, state_pairs_s, xBC_strides, 0),
    ):
        launches.bind_BC(sizes, value_strides, backward=backward)(
            values, target, source, delta, dA_cumsum, position_ids, boundary_states, score_grads,
            state_pair_sums, partial_grads[part],
        )  # fmt: skip
    launches.bind_sum_BC(sizes, grad_strides)(partial_grads, grad_BC)
    grad_dt = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
    param_grads = delta.new_empty(rows * spans, 3, heads)
    launches.bind_dt(sizes)(
        dt, dt_bias.contiguous(), A_log.contiguous(), delta, pair_sums_t, pair_sums_s,
        state_pairs_t, state_pairs_s, D_terms, spanning_pairs, grad_dt, param_grads,
    )  # fmt: skip
    return grad_xBC, grad_dt, param_grads.sum(0), grad_state


@_backward.register_fake
def _(
    dy: Tensor, grad_final_state: Tensor | None, xBC: Tensor, dt: Tensor, dt_bias: Tensor,
    A_log: Tensor, D: Tensor, states: Tensor, span_decays: Tensor, positions: Tensor | None,
    head_dim: int, state_size: int, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        xBC.new_empty(xBC.shape),
        dt.new_empty(dt.shape),
        dt.new_empty(3, dt.shape[2], dtype=torch.float32),
        xBC.new_empty(len(xBC), dt.shape[2], head_dim, state_size, dtype=torch.float32),
    )


def _empty_states(like: Tensor, sizes: Sizes) -> Tensor:
    return like.new_empty(sizes.rows, sizes.spans, sizes.heads, sizes.head_dim, sizes.state_size)


def _compute_delta(
    dt: Tensor, dt_bias: Tensor, A_log: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """Return Δ and its cumulative sum Δ·A over each chunk: fp32 [rows, heads, padded_length]."""
    shape = (2, sizes.rows, sizes.heads, sizes.padded_length)
    delta, dA_cumsum = dt.new_empty(shape, dtype=torch.float32).unbind()
    launches.bind_delta(sizes)(dt, dt_bias.contiguous(), A_log.contiguous(), delta, dA_cumsum)
    return delta, dA_cumsum


def _scan_states(
    sizes: Sizes,
    contributions: Tensor,
    states: Tensor,
    initial: Tensor | None,
    span_decays: Tensor,
    axis: str,
    backward_states: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Scan the spans' contributions: fill `states` with the states at span starts (backward: their
    gradients at span ends) and return the final state [rows, heads, head_dim, state_size].

    `backward_states`, in the backward pass: the forward states, and the tensor that receives their
    products with the gradients.
    """
    backward = backward_states is not None

    def scan(initial: Tensor | None, *, write: bool) -> Tensor:
        final = contributions.new_empty(sizes.rows, sizes.heads, sizes.head_dim, sizes.state_size)
        start = initial is not None
        launches.bind_scan_states(sizes, start=start, backward=backward, write=write)(
            contributions, states,
            contributions if initial is None else initial.float().contiguous(), span_decays, final,
            *(backward_states or (states, contributions)),
        )  # fmt: skip
        return final

    if (context := find_axis(axis)).size > 1:
        rank_decay = span_decays.prod(1)[..., None, None]
        received = receive_state(scan(initial, write=False), rank_decay, context, backward=backward)
        initial = received if initial is None else initial + received
    return scan(initial, write=True)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    xBC, dt, dt_bias, A_log, D, state, positions, *ctx.options = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.has_state = state is not None
    ctx.save_for_backward(xBC, dt, dt_bias, A_log, D, *output[2:], positions)


def _autograd_backward(
    ctx: Any, dy: Tensor | None, grad_final_state: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    xBC, dt, *parameters = saved[:5]
    if dy is None:
        dy = xBC.new_zeros(*xBC.shape[:2], dt.shape[2] * ctx.options[0])
    grad_xBC, grad_dt, param_grads, grad_state = _backward(
        dy, grad_final_state, *saved, *ctx.options
    )
    return (
        grad_xBC,
        grad_dt,
        *(g.to(p.dtype) for g, p in zip(param_grads, parameters, strict=True)),
        grad_state if ctx.has_state else None,
        *(None, None, None, None),
    )


ssd.register_autograd(_autograd_backward, setup_context=_setup_context)
