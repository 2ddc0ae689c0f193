"""Hyena-LI's modal form with its gates: a scan of N real states for each channel, without an FFT.

    S_t = λ·S_{t−1} + w_t,  y_t = q_t·(Σ_n R_n·S_{n,t} + skip·w_t),  w = k ⊙ v

Rows are cut into chunks. One pass over the inputs finds what each chunk adds to the states; a scan
over the chunks carries them along; a second pass has the states and gives the outputs: five
tensors read and one written, where there are four. States and sums are fp32.

Backward, the gradients of the states are carried the same way from the end, and the gradients of
the poles come from the states' derivatives by them, P_t = λ·P_{t−1} + S_{t−1}, carried forward as
S is: no state of a token is ever kept. Its twin is in
models/gated_convolution.py, `gated_modal`.

Where processes divide the rows, the states pass from part to part inside the op, forward, and
their gradients inside its backward pass, between what a chunk adds and what is carried.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..parallel.axes import named
from ..parallel.states import entering
from .layout import by_token

MODES = 32
"""States of a channel that a thread can hold."""
CHUNK = 256
"""Tokens that a program walks along."""
UNROLL = 8
"""Of them at a time, or the greatest divisor of it that divides the rows' length."""
CHANNELS = 128
BLOCK = 256
"""States that a program carries over the chunks."""
AHEAD = 8
"""Chunks that it reads at once."""


@cache
def _programs() -> Any:
    from .programs import modal

    return modal


def beyond(rates: Tensor) -> str | None:
    """What keeps the kernel from this filter."""
    if rates.is_complex():
        return "its poles are real, and these are complex"
    if rates.shape[1] > MODES:
        return f"a channel has {rates.shape[1]} states, and it holds {MODES}"
    return None


@torch.library.custom_op("headrace::modal", mutates_args=())
def modal(
    x: Tensor,
    poles: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    state: Tensor | None,
    positions: Tensor | None,
    gated: bool,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the states after the rows, and those that come into each chunk (for the backward pass).

    x [rows, length, width or 3·width], poles λ and residues fp32 [width, N], state
    [rows, width, N]. `axis` is the name of the one that divides the rows, if one does; then the
    states after them have no gradient.
    """
    x, where, sizes, switches, grid = _laid_out(x, poles, positions, gated)
    rows, length, (width, modes) = x.shape[0], x.shape[1], poles.shape
    unbroken = _unbroken(positions, rows, grid[0], x)
    lambdas, weights = _by_mode(poles), _by_mode(residues)
    states = x.new_empty(rows, grid[0], modes, width, dtype=torch.float32)
    programs = _programs()
    programs.summaries[grid](x, where, unbroken, lambdas, states, *sizes, **switches)
    start = None if state is None else _by_mode(state)
    _, end = _carry(states, start, lambdas, unbroken, length, axis, backward=False)
    out = torch.empty(rows, length, width, dtype=x.dtype, device=x.device)
    programs.forward[grid](
        x, where, unbroken, lambdas, weights, x if skip is None else skip, states, out, *sizes,
        SKIP=skip is not None, **switches,
    )  # fmt: skip
    return out, _by_channel(end), states


@modal.register_fake
def _(x: Tensor, poles: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, length, (width, modes) = x.shape[0], x.shape[1], poles.shape
    return (
        x.new_empty(rows, length, width),
        x.new_empty(rows, width, modes, dtype=torch.float32),
        x.new_empty(rows, -(-length // CHUNK), modes, width, dtype=torch.float32),
    )


@torch.library.custom_op("headrace::modal_backward", mutates_args=())
def _backward(
    grad: Tensor,
    grad_final: Tensor | None,
    x: Tensor,
    poles: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    states: Tensor,
    positions: Tensor | None,
    gated: bool,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, the poles, the residues, the skip and the state before the rows."""
    x, where, sizes, switches, grid = _laid_out(x, poles, positions, gated)
    rows, length, (width, modes) = x.shape[0], x.shape[1], poles.shape
    unbroken = _unbroken(positions, rows, grid[0], x)
    grad = grad.contiguous()
    lambdas, weights = _by_mode(poles), _by_mode(residues)
    slopes, adjoints = torch.empty_like(states), torch.empty_like(states)
    switches["FINAL"] = grad_final is not None
    programs = _programs()
    programs.backward_summaries[grid](
        grad, x, where, unbroken, lambdas, weights, states, slopes, adjoints, *sizes, **switches
    )
    _, slope = _carry(slopes, None, lambdas, unbroken, length, "", backward=False)
    behind = None if grad_final is None else _by_mode(grad_final)
    behind, before = _carry(adjoints, behind, lambdas, unbroken, length, axis, backward=True)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = x.new_empty(rows, grid[0], 2 * modes + 1, width, dtype=torch.float32)
    programs.backward[grid](
        grad, x, where, unbroken, lambdas, weights, x if skip is None else skip, states, slopes,
        adjoints, grad_x, partial, *sizes, SKIP=skip is not None, **switches,
    )  # fmt: skip
    of_residues, of_poles, of_skip = partial.sum((0, 1)).split([modes, modes, 1])
    # As programs/modal.py says, adjoints are without λ·R unless the final states have gradients.
    scale = 1.0 if grad_final is not None else lambdas * weights
    if behind is not None:
        of_poles = of_poles + (behind * scale * slope).sum(0)
    return (
        grad_x,
        _by_channel(of_poles),
        _by_channel(of_residues),
        of_skip[0].clone(),
        _by_channel(before * scale),
    )


@_backward.register_fake
def _(
    grad: Tensor, grad_final: Tensor | None, x: Tensor, poles: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = poles.new_empty(poles.shape, dtype=torch.float32)
    return (
        x.new_empty(x.shape),
        like,
        torch.empty_like(like),
        poles.new_empty(len(poles), dtype=torch.float32),
        poles.new_empty(len(x), *poles.shape, dtype=torch.float32),
    )


def _carry(
    states: Tensor,
    start: Tensor | None,
    lambdas: Tensor,
    unbroken: Tensor,
    length: int,
    axis: str,
    *,
    backward: bool,
) -> tuple[Tensor | None, Tensor]:
    """What the chunks add becomes, in place, what comes into them. Returns what comes into the
    rows, and what comes out of them."""
    rows, chunks, modes, width = states.shape
    numbers = modes * width
    powers = torch.stack([lambdas**CHUNK, lambdas ** (length - (chunks - 1) * CHUNK)])

    def walk(start: Tensor | None, *, write: bool) -> Tensor:
        end = states.new_empty(rows, modes, width)
        _programs().carry[(-(-numbers // BLOCK), rows)](
            states, states if start is None else start, powers, unbroken, end, chunks, numbers,
            START=start is not None, BACKWARD=backward, WRITE=write, BLOCK=BLOCK, AHEAD=AHEAD,
        )  # fmt: skip
        return end

    if (parts := named(axis)).size > 1:
        kept = lambdas**length * unbroken.prod(1)[:, None, None]
        others = entering(walk(start, write=False), kept, parts, backward=backward)
        start = others if start is None else start + others
    return start, walk(start, write=True)


def _laid_out(
    x: Tensor, poles: Tensor, positions: Tensor | None, gated: bool
) -> tuple[Tensor, Tensor, tuple[int, ...], dict[str, Any], tuple[int, int, int]]:
    x = by_token(x)
    rows, length, (width, modes) = x.shape[0], x.shape[1], poles.shape
    chunks = -(-length // CHUNK)
    switches = {
        "GATED": gated,
        "PACKED": positions is not None,
        "MODES": modes,
        "CHUNK": CHUNK,
        "UNROLL": gcd(length, UNROLL),
        "CHANNELS": CHANNELS,
        "num_warps": CHANNELS // 32,
    }
    where = x if positions is None else positions.contiguous()
    sizes = (length, width, chunks, x.stride(0), x.stride(1))
    return x, where, sizes, switches, (chunks, -(-width // CHANNELS), rows)


def _unbroken(positions: Tensor | None, rows: int, chunks: int, x: Tensor) -> Tensor:
    """fp32 [rows, chunks]: 1 where no document begins in a chunk, 0 where one does."""
    if positions is None:
        return x.new_ones(rows, chunks, dtype=torch.float32)
    padded = F.pad(positions, (0, chunks * CHUNK - positions.shape[1]), value=1)
    on: Tensor = (padded != 0).unflatten(1, (chunks, CHUNK)).all(-1)
    return on.float()


def _by_mode(x: Tensor) -> Tensor:
    """[…, width, N] → fp32 […, N, width]."""
    return x.float().transpose(-1, -2).contiguous()


def _by_channel(x: Tensor) -> Tensor:
    """The reverse."""
    return x.transpose(-1, -2).clone(memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, poles, residues, skip, state, positions, ctx.gated, ctx.axis = inputs
    ctx.mark_non_differentiable(*output[1 if ctx.axis else 2 :])
    ctx.set_materialize_grads(False)
    ctx.has_state = state is not None
    ctx.save_for_backward(x, poles, residues, skip, output[2], positions)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_final: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    x, poles, residues, skip, _, _ = ctx.saved_tensors
    if grad is None:
        grad = x.new_zeros(*x.shape[:2], len(poles))
    grad_x, of_poles, of_residues, of_skip, before = _backward(
        grad, grad_final, *ctx.saved_tensors, ctx.gated, ctx.axis
    )
    return (
        grad_x,
        of_poles.to(poles.dtype),
        of_residues.to(residues.dtype),
        None if skip is None else of_skip.to(skip.dtype),
        before if ctx.has_state else None,
        *(None, None, None),
    )


modal.register_autograd(_differentiate, setup_context=_keep)
