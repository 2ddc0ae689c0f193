"""Mamba-1's selective scan, from the softplus of dt to the output gate.

    Δ = softplus(dt + dt_bias),  S_t = exp(Δ_t·A)·S_{t−1} + Δ_t·x_t·B_t
    y_t = (S_t·C_t + D·x_t)·silu(z_t)

Rows are cut into chunks, so that a single long row fills a GPU. The summary pass computes each
chunk's contribution to the states, a scan over the chunks turns the contributions into the states
at each chunk's start, and a second pass writes the outputs. In bf16, for each token and channel:
the first pass reads 4 bytes, the second moves 8 (x, dt, z and y: the minimum), and each chunk's N
states are written, scanned and read (2 bytes for N = 16). The exponentials take the time: one per
state number in each pass.

The forward pass keeps only the states at each chunk's start; the backward pass recomputes all
others. It scans the state gradients by chunks in the same way (6 bytes), and one program walks
along each chunk and back (30 bytes, where the minimum is 14). dB and dC are sums over channels,
first in a program and then over programs: no atomics, the same bits every time. Inner arithmetic is
fp32. The twin is `plain` in models/layers/gated_scan.py.

Under context parallelism the op exchanges states between a row's ranks: the states forward, and
their gradients backward, after the summary pass and before the scan over chunks.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..parallel.groups import find_axis
from ..parallel.states import receive_state
from .launch import Programs
from .layout import to_channels_last
from .op import op

MAX_MODES = 64
"""Kernel limit: state numbers per channel."""
STATE_NUMBERS = 1024
"""State numbers per warp: 32 registers per thread, four times as many backward."""
MAX_CHANNELS = 64
"""Upper bound on a program's channels."""
CHUNK = 128
"""Tokens per chunk; one program scans it."""
UNROLL = 4
"""Tokens loaded ahead; in the second backward pass one, for which the registers suffice."""
BLOCK = 256
"""State numbers per program in the scan over chunks."""
AHEAD = 8
"""Chunks loaded ahead."""


@cache
def _programs() -> Any:
    from .programs import selective_scan

    return Programs(selective_scan)


@cache
def _programs_backward() -> Any:
    from .programs import selective_scan_backward

    return Programs(selective_scan_backward)


def unsupported_reason(B: Tensor) -> str | None:
    """Return why the kernel does not support N states, for B [rows, length, heads, N], or None."""
    if B.shape[-1] > MAX_MODES:
        return f"a channel has {B.shape[-1]} numbers of state, and the limit is {MAX_MODES}"
    return None


@op("selective_scan")
def selective_scan(
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    state: Tensor | None,
    positions: Tensor | None,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y [rows, length, heads · channels] and the final state [rows, heads, channels, N]; for
    the backward pass, the states at chunk starts [rows, chunks, modes, width] and Σ Δ over each
    chunk [rows, chunks, width]. modes is N as a power of two, width is heads · channels.

    x and dt [rows, length, heads, channels], B and C [rows, length, heads, N], z like y; dt_bias
    and D [heads, channels], A [heads, channels, N]; state, the initial one, like the final one;
    positions [rows, length] for packed rows. `axis` names the context axis that shards the rows, or
    is empty.
    """
    x, dt, dt_bias, B, C, D = (t.contiguous() for t in (x, dt, dt_bias, B, C, D))
    z, position_ids = to_channels_last(z), x if positions is None else positions.contiguous()
    sizes, constants, grid = _launch_layout(x, B, positions)
    rows, chunks, width, modes = len(x), grid[0], z.shape[2], constants["MODES"]
    rates = _modes_first(A, modes) / math.log(2)
    states = x.new_empty(rows, chunks, modes, width, dtype=torch.float32)
    delta_sums = x.new_empty(rows, chunks, width, dtype=torch.float32)
    forward_programs = _programs()
    forward_programs.selective_scan_chunk_states[grid](
        x, dt, dt_bias, rates, B, position_ids, states, delta_sums, *sizes, **constants
    )
    initial = None if state is None else _modes_first(state, modes)
    final_state = _scan_states(states, delta_sums, rates, initial, axis, backward=False)
    out = x.new_empty(z.shape)
    forward_programs.selective_scan_forward[grid](
        x, dt, z, dt_bias, rates, B, C, D, position_ids, states, out, *sizes, z.stride(0),
        z.stride(1), **constants,
    )  # fmt: skip
    return out, _channels_first(final_state, A), states, delta_sums


@selective_scan.register_fake
def _(x: Tensor, dt: Tensor, dt_bias: Tensor, A: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    z = arguments[3]
    rows, chunks, width = len(x), -(-x.shape[1] // CHUNK), z.shape[2]
    return (
        x.new_empty(z.shape),
        A.new_empty(rows, *A.shape, dtype=torch.float32),
        A.new_empty(rows, chunks, _round_to_power(A.shape[2]), width, dtype=torch.float32),
        A.new_empty(rows, chunks, width, dtype=torch.float32),
    )


@op("selective_scan_backward")
def _backward(
    dy: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    states: Tensor,
    delta_sums: Tensor,
    positions: Tensor | None,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients for x, dt, dt_bias, A, B, C, D, z and the initial state; parameter and
    state gradients in fp32. dy is y's gradient."""
    dy, x, dt, dt_bias, B, C, D = (t.contiguous() for t in (dy, x, dt, dt_bias, B, C, D))
    z, position_ids = to_channels_last(z), x if positions is None else positions.contiguous()
    sizes, constants, grid = _launch_layout(x, B, positions)
    rows, chunks, modes, width = states.shape
    rates = _modes_first(A, modes) / math.log(2)
    z_strides = (z.stride(0), z.stride(1))
    grad_states = torch.empty_like(states)
    backward_programs = _programs_backward()
    backward_programs.selective_scan_backward_chunk_states[grid](
        dy, dt, z, dt_bias, rates, C, position_ids, grad_states, *sizes, *z_strides, **constants
    )
    grad_end = None if grad_final_state is None else _modes_first(grad_final_state, modes)
    grad_state = _scan_states(grad_states, delta_sums, rates, grad_end, axis, backward=True)
    grad_x, grad_dt, grad_z = torch.empty_like(x), torch.empty_like(dt), x.new_empty(z.shape)
    state_terms = x.new_empty(z.shape, dtype=torch.float32)
    grad_A = torch.empty_like(states)
    grad_D, grad_bias = delta_sums.new_empty(2, rows, chunks, width)
    num_blocks = sizes[-1]
    grad_B, grad_C = delta_sums.new_empty(2, num_blocks, *B.shape)
    backward_programs.selective_scan_backward[grid](
        dy, x, dt, z, dt_bias, rates, B, C, D, position_ids, states, grad_states, state_terms,
        grad_x, grad_dt, grad_z, grad_A, grad_D, grad_bias, grad_B, grad_C, *sizes, *z_strides,
        **{**constants, "UNROLL": 1},
    )  # fmt: skip
    return (
        grad_x,
        grad_dt,
        grad_bias.sum((0, 1)).view_as(dt_bias),
        _channels_first(grad_A.sum((0, 1)), A),
        grad_B.sum(0).to(B.dtype),
        grad_C.sum(0).to(C.dtype),
        grad_D.sum((0, 1)).view_as(D),
        grad_z,
        _channels_first(grad_state, A),
    )


@_backward.register_fake
def _(grad: Tensor, grad_final: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    x, dt, dt_bias, A, B, C, D, z, _, spans, _, _ = arguments
    of_bias, of_A, of_D = (spans.new_empty(t.shape) for t in (dt_bias, A, D))
    of_x, of_dt, of_B, of_C, of_z = (t.new_empty(t.shape) for t in (x, dt, B, C, z))
    return of_x, of_dt, of_bias, of_A, of_B, of_C, of_D, of_z, spans.new_empty(len(x), *A.shape)


def _scan_states(
    states: Tensor,
    delta_sums: Tensor,
    rates: Tensor,
    initial: Tensor | None,
    axis: str,
    *,
    backward: bool,
) -> Tensor:
    """Replace each chunk's contribution in `states` by the state at its start. Return the final
    state [rows, modes, width]."""
    rows, chunks, modes, width = states.shape
    state_numbers = modes * width

    def scan(initial: Tensor | None, *, write: bool) -> Tensor:
        final = states.new_empty(rows, modes, width)
        _programs().selective_scan_scan_states[(-(-state_numbers // BLOCK), rows)](
            states, delta_sums, rates, states if initial is None else initial, final, width, chunks,
            state_numbers, START=initial is not None, BACKWARD=backward, WRITE=write, BLOCK=BLOCK,
            UNROLL=AHEAD, num_warps=4,
        )  # fmt: skip
        return final

    if (context := find_axis(axis)).size > 1:
        total_delta = delta_sums.sum(1).unsqueeze(1)
        rank_decay = torch.where(total_delta.isinf(), 0, torch.exp2(rates * total_delta))
        received = receive_state(scan(initial, write=False), rank_decay, context, backward=backward)
        initial = received if initial is None else initial + received
    return scan(initial, write=True)


def _launch_layout(
    x: Tensor, B: Tensor, positions: Tensor | None
) -> tuple[tuple[int, ...], dict[str, Any], tuple[int, int, int]]:
    (rows, length, heads, channels), state_size = x.shape, B.shape[3]
    modes = _round_to_power(state_size)
    channels_per_program = min(MAX_CHANNELS, STATE_NUMBERS // modes)
    chunks, blocks = -(-length // CHUNK), -(-channels // channels_per_program)
    constants = {
        "PACKED": positions is not None,
        "MODES": modes,
        "CHANNELS": channels_per_program,
        "CHUNK": CHUNK,
        "UNROLL": UNROLL,
        "num_warps": 1,
    }
    sizes = (length, chunks, channels, heads, state_size, blocks)
    return sizes, constants, (chunks, blocks * heads, rows)


def _round_to_power(modes: int) -> int:
    return 1 << (modes - 1).bit_length()


def _modes_first(x: Tensor, modes: int) -> Tensor:
    """Map […, heads, channels, N] to fp32 […, modes, width], padded with zeros."""
    by_channel = x.float().flatten(-3, -2)
    return F.pad(by_channel, (0, modes - x.shape[-1])).transpose(-1, -2).contiguous()


def _channels_first(x: Tensor, like: Tensor) -> Tensor:
    """Invert `_modes_first`, to the shape of `like`."""
    by_channel: Tensor = x[..., : like.shape[2], :].transpose(-1, -2).unflatten(-2, like.shape[:2])
    return by_channel.contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, state, positions, ctx.axis = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.has_state = state is not None
    ctx.save_for_backward(*tensors, *output[2:], positions)


def _autograd_backward(
    ctx: Any, dy: Tensor | None, grad_final_state: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    inputs = saved[:8]
    if dy is None:
        dy = torch.zeros_like(inputs[7])
    *grads, grad_state = _backward(dy, grad_final_state, *saved, ctx.axis)
    typed_grads = (g.to(t.dtype) for g, t in zip(grads, inputs, strict=True))
    return *typed_grads, grad_state if ctx.has_state else None, None, None


selective_scan.register_autograd(_autograd_backward, setup_context=_setup_context)
