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

from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ..parallel.groups import find_axis
from ..parallel.states import receive_state
from . import ssd_next
from .launch import Programs
from .layout import to_channels_last
from .op import op
from .ssd_limits import tile_side

CHUNK = 64
CHUNKS = 4
"""Chunks per span."""
MAX_HEADS = 16
"""Upper bound on the heads over which a program sums dB and dC; a power of two."""
DELTA_HEADS = 16
"""Heads per program, in ssd_delta and ssd_backward_dt."""
STATE_BLOCK = 512
"""State numbers per program, in ssd_scan_states."""
AHEAD = 8
"""Spans that it loads ahead."""
OPTIONS = {"num_warps": 8, "num_stages": 1}
"""8 warps for programs with matrix products: accumulators fill the registers of four."""
PAIR_OPTIONS = {"num_warps": 4, "num_stages": 1}
"""64 rows are too few for eight warps."""


@cache
def _programs() -> Any:
    from .programs import ssd, ssd_backward

    return Programs(ssd), Programs(ssd_backward)


@dataclass(frozen=True)
class _Sizes:
    """A call's sizes, and the program arguments derived from them."""

    rows: int
    length: int
    heads: int
    groups: int
    head_dim: int
    state_size: int
    packed: bool
    fp32: bool

    @cached_property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @cached_property
    def heads_per_group(self) -> int:
        return self.heads // self.groups

    @cached_property
    def chunks(self) -> int:
        return -(-self.length // CHUNK)

    @cached_property
    def padded_length(self) -> int:
        return self.chunks * CHUNK

    @cached_property
    def spans(self) -> int:
        return -(-self.chunks // CHUNKS)

    @cached_property
    def span_arguments(self) -> tuple[int, ...]:
        """Arguments for programs that work on spans, in order."""
        return (
            self.length,
            self.padded_length,
            self.spans,
            self.heads,
            self.heads_per_group,
            self.head_dim,
            self.state_size,
        )

    @cached_property
    def constants(self) -> dict[str, Any]:
        return {
            "PACKED": self.packed,
            "CHUNK": CHUNK,
            "CHUNKS": CHUNKS,
            "HEAD_DIM": tile_side(self.head_dim),
            "STATE_SIZE": tile_side(self.state_size),
            "PRECISION": "tf32x3" if self.fp32 else "ieee",
        }

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        return self.spans, self.heads, self.rows


def _sizes(
    xBC: Tensor, dt: Tensor, positions: Tensor | None, head_dim: int, state_size: int
) -> _Sizes:
    (rows, length, width), heads = xBC.shape, dt.shape[2]
    groups = (width - heads * head_dim) // (2 * state_size)
    packed, fp32 = positions is not None, xBC.dtype == torch.float32
    return _Sizes(rows, length, heads, groups, head_dim, state_size, packed, fp32)


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
    sizes = _sizes(xBC, dt, positions, head_dim, state_size)
    xBC, dt = to_channels_last(xBC), to_channels_last(dt)
    x, B, C = _split_xBC(xBC, sizes)
    delta, dA_cumsum = _compute_delta(dt, dt_bias, A_log, sizes)
    position_ids = delta if positions is None else positions.contiguous()
    contributions = _empty_states(delta, sizes)
    span_decays = delta.new_empty(sizes.rows, sizes.spans, sizes.heads)
    strides, programs = xBC.stride()[:2], _programs()[0]
    programs.ssd_span_states[sizes.grid](
        x, B, delta, dA_cumsum, position_ids, contributions, span_decays, *sizes.span_arguments,
        *strides, *strides, BACKWARD=False, **sizes.constants, **OPTIONS,
    )  # fmt: skip
    states = _empty_states(xBC, sizes)
    final_state = _scan_states(contributions, states, state, span_decays, axis)
    out = torch.empty(sizes.rows, sizes.length, sizes.inner, dtype=xBC.dtype, device=xBC.device)
    programs.ssd_outputs[sizes.grid](
        x, C, B, delta, dA_cumsum, D.contiguous(), position_ids, states, out,
        *sizes.span_arguments, *strides, *strides, *out.stride()[:2], BACKWARD=False,
        **sizes.constants, **OPTIONS,
    )  # fmt: skip
    return out, final_state, states, span_decays


@ssd.register_fake
def _(
    xBC: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, D: Tensor, state: Tensor | None,
    positions: Tensor | None, head_dim: int, state_size: int, axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if ssd_next.runs(xBC):
        return ssd_next.forward_shapes(xBC, dt, state, head_dim, state_size, axis)
    sizes = _sizes(xBC, dt, positions, head_dim, state_size)
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
    sizes = _sizes(xBC, dt, positions, head_dim, state_size)
    xBC, dt, dy = to_channels_last(xBC), to_channels_last(dt), to_channels_last(dy)
    x, B, C = _split_xBC(xBC, sizes)
    delta, dA_cumsum = _compute_delta(dt, dt_bias, A_log, sizes)
    position_ids = delta if positions is None else positions.contiguous()
    (rows, heads, spans), chunks = (sizes.rows, sizes.heads, sizes.spans), sizes.chunks
    xBC_strides, dy_strides = xBC.stride()[:2], dy.stride()[:2]
    forward_programs, programs = _programs()
    contributions = _empty_states(delta, sizes)
    spanning_pairs = delta.new_empty(rows, spans, heads, _num_state_blocks(sizes))
    forward_programs.ssd_span_states[sizes.grid](
        dy, C, delta, dA_cumsum, position_ids, contributions, span_decays, *sizes.span_arguments,
        *dy_strides, *xBC_strides, BACKWARD=True, **sizes.constants, **OPTIONS,
    )  # fmt: skip
    grad_states = torch.empty_like(states)
    grad_state = _scan_states(
        contributions, grad_states, grad_final_state, span_decays, axis, (states, spanning_pairs)
    )
    grad_xBC = torch.empty(xBC.shape, dtype=xBC.dtype, device=xBC.device)
    grad_x, grad_B, grad_C = _split_xBC(grad_xBC, sizes)
    forward_programs.ssd_outputs[sizes.grid](
        dy, B, C, delta, dA_cumsum, D.contiguous(), position_ids, grad_states, grad_x,
        *sizes.span_arguments, *dy_strides, *xBC_strides, *grad_xBC.stride()[:2], BACKWARD=True,
        **sizes.constants, **OPTIONS,
    )  # fmt: skip

    heads_per_program = gcd(sizes.heads_per_group, MAX_HEADS)
    blocks_per_group = sizes.heads_per_group // heads_per_program
    num_blocks = sizes.groups * blocks_per_group
    pair_sums_t, pair_sums_s = delta.new_empty(2, rows, CHUNKS, heads, sizes.padded_length)
    D_terms, state_pairs_t, state_pairs_s = delta.new_empty(3, rows, heads, sizes.padded_length)
    score_grads = xBC.new_empty(rows, chunks, CHUNKS, num_blocks, CHUNK, CHUNK)
    for SAME in (True, False):
        programs.ssd_backward_pairs[(chunks, num_blocks * (1 if SAME else CHUNKS - 1), rows)](
            dy, x, B, C, delta, dA_cumsum, position_ids, pair_sums_t, pair_sums_s, D_terms,
            score_grads, sizes.length, sizes.padded_length, heads, sizes.heads_per_group, head_dim,
            state_size, *dy_strides, *xBC_strides, SAME=SAME, HEADS=heads_per_program,
            **sizes.constants, **PAIR_OPTIONS,
        )  # fmt: skip
    partial_grads = delta.new_empty(num_blocks, rows, sizes.length, state_size)
    for BACKWARD, values, target, source, boundary_states, state_pair_sums, value_strides, out in (
        (False, dy, C, B, states, state_pairs_t, dy_strides, grad_C),
        (True, x, B, C, grad_states, state_pairs_s, xBC_strides, grad_B),
    ):
        programs.ssd_backward_BC[(chunks, num_blocks, rows)](
            values, target, source, delta, dA_cumsum, position_ids, boundary_states, score_grads,
            state_pair_sums, partial_grads, *sizes.span_arguments, *value_strides, *xBC_strides,
            BACKWARD=BACKWARD, HEADS=heads_per_program, **sizes.constants, **OPTIONS,
        )  # fmt: skip
        programs.ssd_backward_sum_BC[(chunks, sizes.groups, rows)](
            partial_grads, out, sizes.length, sizes.groups, blocks_per_group, state_size,
            *grad_xBC.stride()[:2], CHUNK=CHUNK, STATE_SIZE=tile_side(state_size),
        )  # fmt: skip
    grad_dt = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
    param_grads = delta.new_empty(rows * spans, 3, heads)
    programs.ssd_backward_dt[(spans, -(-heads // DELTA_HEADS), rows)](
        dt, dt_bias.contiguous(), A_log.contiguous(), delta, pair_sums_t, pair_sums_s,
        state_pairs_t, state_pairs_s, D_terms, spanning_pairs, grad_dt, param_grads, sizes.length,
        heads, sizes.padded_length, spans, spanning_pairs.shape[3], *dt.stride()[:2], CHUNK=CHUNK,
        CHUNKS=CHUNKS, HEADS=DELTA_HEADS,
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


def _split_xBC(xBC: Tensor, sizes: _Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, B and C as views of xBC."""
    inner, BC_width = sizes.inner, sizes.groups * sizes.state_size
    return xBC[..., :inner], xBC[..., inner : inner + BC_width], xBC[..., inner + BC_width :]


def _empty_states(like: Tensor, sizes: _Sizes) -> Tensor:
    return like.new_empty(sizes.rows, sizes.spans, sizes.heads, sizes.head_dim, sizes.state_size)


def _num_state_blocks(sizes: _Sizes) -> int:
    """Return the number of programs that scan one head's state."""
    return -(-sizes.head_dim * sizes.state_size // STATE_BLOCK)


def _compute_delta(
    dt: Tensor, dt_bias: Tensor, A_log: Tensor, sizes: _Sizes
) -> tuple[Tensor, Tensor]:
    """Return Δ and its cumulative sum Δ·A over each chunk: fp32 [rows, heads, padded_length]."""
    shape = (sizes.rows, sizes.heads, sizes.padded_length)
    delta, dA_cumsum = dt.new_empty(2, *shape, dtype=torch.float32)
    _programs()[0].ssd_delta[(sizes.chunks, -(-sizes.heads // DELTA_HEADS), sizes.rows)](
        dt, dt_bias.contiguous(), A_log.contiguous(), delta, dA_cumsum, sizes.length, sizes.heads,
        sizes.padded_length, *dt.stride()[:2], CHUNK=CHUNK, HEADS=DELTA_HEADS,
    )  # fmt: skip
    return delta, dA_cumsum


def _scan_states(
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
    rows, spans, heads, head_dim, state_size = contributions.shape
    state_numbers = head_dim * state_size

    def scan(initial: Tensor | None, *, write: bool) -> Tensor:
        final = contributions.new_empty(rows, heads, head_dim, state_size)
        _programs()[0].ssd_scan_states[(-(-state_numbers // STATE_BLOCK), heads, rows)](
            contributions, states,
            contributions if initial is None else initial.float().contiguous(), span_decays, final,
            *(backward_states or (states, contributions)), spans, heads, state_numbers,
            START=initial is not None, BACKWARD=backward_states is not None, WRITE=write,
            BLOCK=STATE_BLOCK, AHEAD=AHEAD,
        )  # fmt: skip
        return final

    if (context := find_axis(axis)).size > 1:
        rank_decay = span_decays.prod(1)[..., None, None]
        received = receive_state(
            scan(initial, write=False), rank_decay, context, backward=backward_states is not None
        )
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
