"""Mamba-1's selective scan, from the softplus of dt to the output gate.

    Δ = softplus(dt + bias),  S_t = exp(Δ_t·A)·S_{t−1} + Δ_t·x_t·B_t
    y_t = (S_t·C_t + D·x_t)·silu(z_t)

Rows are cut into chunks, so that a single long row fills a GPU. The summary pass computes each
chunk's contribution to the states, a scan over the chunks turns the contributions into the states
at each chunk's start, and a second pass writes the outputs. In bf16, for each token and channel:
the first pass reads 4 bytes, the second moves 8 (x, dt, z and y: the minimum), and the N states of
each chunk are written, scanned and read (2 bytes for N = 16). The exponentials take the time: one
for each number of state in each pass.

The forward pass keeps only the states at each chunk's start; the backward pass recomputes all
others. It scans the gradients of the states by chunks in the same way (6 bytes), and one program
walks along each chunk and back (30 bytes, where the minimum is 14). The gradients of B and C are
sums over channels, first in a program and then over programs: no atomics, the same bits every time.
Inner arithmetic is fp32. The twin is `plain` in models/layers/gated_scan.py.

Under context parallelism the op exchanges states between the ranks of a row: the states forward,
and their gradients backward, after the summary pass and before the scan over chunks.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..parallel.groups import named
from ..parallel.states import entering
from .layout import to_channels_last
from .op import op

MODES = 64
"""Most numbers of state of a channel."""
NUMBERS = 1024
"""Numbers of state that a warp holds: 32 registers of each thread, four times as many backward."""
CHANNELS = 64
"""Most channels of a program."""
CHUNK = 128
"""Tokens of a chunk; one program scans it."""
UNROLL = 4
"""Tokens that it reads ahead; in the second pass backward one, for which the registers suffice."""
BLOCK = 256
"""States that a program scans over the chunks."""
AHEAD = 8
"""Chunks that it reads ahead."""


@cache
def _programs() -> Any:
    from .programs import selective_scan

    return selective_scan


@cache
def _programs_backward() -> Any:
    from .programs import selective_scan_backward

    return selective_scan_backward


def unsupported_reason(B: Tensor) -> str | None:
    """Return why the kernel cannot hold states of this size, or None."""
    if B.shape[-1] > MODES:
        return f"a channel has {B.shape[-1]} numbers of state, and the limit is {MODES}"
    return None


@op("selective_scan")
def selective_scan(
    x: Tensor,
    dt: Tensor,
    bias: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    state: Tensor | None,
    positions: Tensor | None,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, the states after the rows and, for the backward pass, the states at each chunk's
    start and the sum of Δ over each chunk.

    x and dt [rows, length, heads, channels], B and C [rows, length, heads, N], z
    [rows, length, heads · channels]; bias and D [heads, channels], A [heads, channels, N] and the
    state [rows, heads, channels, N]. `axis` names the context axis that shards the rows, or is
    empty.
    """
    x, dt, bias, B, C, D = (t.contiguous() for t in (x, dt, bias, B, C, D))
    z, where = to_channels_last(z), x if positions is None else positions.contiguous()
    sizes, switches, grid = _laid_out(x, B, positions)
    rows, chunks, width, modes = len(x), grid[0], z.shape[2], switches["MODES"]
    rates = _by_mode(A, modes) / math.log(2)
    states = x.new_empty(rows, chunks, modes, width, dtype=torch.float32)
    spans = x.new_empty(rows, chunks, width, dtype=torch.float32)
    forward_programs = _programs()
    forward_programs.selective_scan_chunk_states[grid](
        x, dt, bias, rates, B, where, states, spans, *sizes, **switches
    )
    start = None if state is None else _by_mode(state, modes)
    final = _carry(states, spans, rates, start, axis, backward=False)
    out = x.new_empty(z.shape)
    forward_programs.selective_scan_forward[grid](
        x, dt, z, bias, rates, B, C, D, where, states, out, *sizes, z.stride(0), z.stride(1),
        **switches,
    )  # fmt: skip
    return out, _by_channel(final, A), states, spans


@selective_scan.register_fake
def _(x: Tensor, dt: Tensor, bias: Tensor, A: Tensor, *others: Any) -> tuple[Tensor, ...]:
    z = others[3]
    rows, chunks, width = len(x), -(-x.shape[1] // CHUNK), z.shape[2]
    return (
        x.new_empty(z.shape),
        A.new_empty(rows, *A.shape, dtype=torch.float32),
        A.new_empty(rows, chunks, _power(A.shape[2]), width, dtype=torch.float32),
        A.new_empty(rows, chunks, width, dtype=torch.float32),
    )


@op("selective_scan_backward")
def _backward(
    grad: Tensor,
    grad_final: Tensor | None,
    x: Tensor,
    dt: Tensor,
    bias: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    states: Tensor,
    spans: Tensor,
    positions: Tensor | None,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs, in order; those of parameters and states in fp32."""
    grad, x, dt, bias, B, C, D = (t.contiguous() for t in (grad, x, dt, bias, B, C, D))
    z, where = to_channels_last(z), x if positions is None else positions.contiguous()
    sizes, switches, grid = _laid_out(x, B, positions)
    rows, chunks, modes, width = states.shape
    rates = _by_mode(A, modes) / math.log(2)
    gate = (z.stride(0), z.stride(1))
    adjoints = torch.empty_like(states)
    backward_programs = _programs_backward()
    backward_programs.selective_scan_backward_chunk_states[grid](
        grad, dt, z, bias, rates, C, where, adjoints, *sizes, *gate, **switches
    )
    end = None if grad_final is None else _by_mode(grad_final, modes)
    before = _carry(adjoints, spans, rates, end, axis, backward=True)
    grad_x, grad_dt, grad_z = torch.empty_like(x), torch.empty_like(dt), x.new_empty(z.shape)
    shared = x.new_empty(z.shape, dtype=torch.float32)
    of_A = torch.empty_like(states)
    of_D, of_bias = spans.new_empty(2, rows, chunks, width)
    blocks = sizes[-1]
    of_B, of_C = spans.new_empty(2, blocks, *B.shape)
    backward_programs.selective_scan_backward[grid](
        grad, x, dt, z, bias, rates, B, C, D, where, states, adjoints, shared,
        grad_x, grad_dt, grad_z, of_A, of_D, of_bias, of_B, of_C, *sizes, *gate,
        **{**switches, "UNROLL": 1},
    )  # fmt: skip
    return (
        grad_x,
        grad_dt,
        of_bias.sum((0, 1)).view_as(bias),
        _by_channel(of_A.sum((0, 1)), A),
        of_B.sum(0).to(B.dtype),
        of_C.sum(0).to(C.dtype),
        of_D.sum((0, 1)).view_as(D),
        grad_z,
        _by_channel(before, A),
    )


@_backward.register_fake
def _(grad: Tensor, grad_final: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    x, dt, bias, A, B, C, D, z, _, spans, _, _ = others
    of_bias, of_A, of_D = (spans.new_empty(t.shape) for t in (bias, A, D))
    of_x, of_dt, of_B, of_C, of_z = (t.new_empty(t.shape) for t in (x, dt, B, C, z))
    return of_x, of_dt, of_bias, of_A, of_B, of_C, of_D, of_z, spans.new_empty(len(x), *A.shape)


def _carry(
    states: Tensor,
    spans: Tensor,
    rates: Tensor,
    start: Tensor | None,
    axis: str,
    *,
    backward: bool,
) -> Tensor:
    """Replace each chunk's contribution by the states at its start, in place. Return the states
    after the rows."""
    rows, chunks, modes, width = states.shape
    numbers = modes * width

    def walk(start: Tensor | None, *, write: bool) -> Tensor:
        end = states.new_empty(rows, modes, width)
        _programs().selective_scan_scan_states[(-(-numbers // BLOCK), rows)](
            states, spans, rates, states if start is None else start, end, width, chunks, numbers,
            START=start is not None, BACKWARD=backward, WRITE=write, BLOCK=BLOCK, UNROLL=AHEAD,
            num_warps=4,
        )  # fmt: skip
        return end

    if (parts := named(axis)).size > 1:
        whole = spans.sum(1).unsqueeze(1)
        kept = torch.where(whole.isinf(), 0, torch.exp2(rates * whole))
        others = entering(walk(start, write=False), kept, parts, backward=backward)
        start = others if start is None else start + others
    return walk(start, write=True)


def _laid_out(
    x: Tensor, B: Tensor, positions: Tensor | None
) -> tuple[tuple[int, ...], dict[str, Any], tuple[int, int, int]]:
    (rows, length, heads, channels), size = x.shape, B.shape[3]
    modes = _power(size)
    side = min(CHANNELS, NUMBERS // modes)
    chunks, blocks = -(-length // CHUNK), -(-channels // side)
    switches = {
        "PACKED": positions is not None,
        "MODES": modes,
        "CHANNELS": side,
        "CHUNK": CHUNK,
        "UNROLL": UNROLL,
        "num_warps": 1,
    }
    sizes = (length, chunks, channels, heads, size, blocks)
    return sizes, switches, (chunks, blocks * heads, rows)


def _power(modes: int) -> int:
    return 1 << (modes - 1).bit_length()


def _by_mode(x: Tensor, modes: int) -> Tensor:
    """Map […, heads, channels, N] to fp32 […, modes, width], padded with zeros."""
    flat = x.float().flatten(-3, -2)
    return F.pad(flat, (0, modes - x.shape[-1])).transpose(-1, -2).contiguous()


def _by_channel(x: Tensor, like: Tensor) -> Tensor:
    """Reverse `_by_mode`, to the shape of `like`."""
    own: Tensor = x[..., : like.shape[2], :].transpose(-1, -2).unflatten(-2, like.shape[:2])
    return own.contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, state, positions, ctx.axis = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.has_state = state is not None
    ctx.save_for_backward(*given, *output[2:], positions)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_final: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    given = saved[:8]
    if grad is None:
        grad = torch.zeros_like(given[7])
    *grads, before = _backward(grad, grad_final, *saved, ctx.axis)
    typed = (g.to(t.dtype) for g, t in zip(grads, given, strict=True))
    return *typed, before if ctx.has_state else None, None, None


selective_scan.register_autograd(_differentiate, setup_context=_keep)
