"""Hyena-LI's modal form with its gates: a scan of N real states for each channel, without an FFT.

    S_t = λ·S_{t−1} + w_t,  y_t = q_t·(Σ_n R_n·S_{n,t} + skip·w_t),  w = k ⊙ v

Rows are cut into chunks. One pass over the inputs finds what each chunk adds to the states; a scan
over the chunks carries them along; a second pass has the states and gives the outputs: five
tensors read and one written, where there are four. States and sums are fp32.

Backward, the gradients of the states are carried the same way from the end, and the gradients of
the poles come from the states' derivatives by them, P_t = λ·P_{t−1} + S_{t−1}, carried forward as
S is: no state of a token is ever kept. Its twin is in
models/gated_convolution.py, `gated_modal`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .layout import by_token

MODES = 32
"""States of a channel that a thread can hold."""
CHUNK = 256
"""Tokens that a program walks along; a power of two."""
UNROLL = 8
CHANNELS = 128
BLOCK = 256
"""States that a program carries over the chunks."""


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
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the states after the rows, and those that come into each chunk (for the backward pass).

    x [rows, length, width or 3·width], poles λ and residues fp32 [width, N], state
    [rows, width, N].
    """
    x, width, modes, chunks = _sizes(x, poles, gated)
    rows, length = x.shape[:2]
    lambdas, weights = _by_mode(poles, modes), _by_mode(residues, modes)
    states = torch.empty(rows, chunks, modes, width, dtype=torch.float32, device=x.device)
    sizes = (length, width, chunks, x.stride(0), x.stride(1))
    where = x if positions is None else positions.contiguous()
    switches = _switches(gated, positions, modes)
    grid = (chunks, -(-width // CHANNELS), rows)
    programs = _programs()
    programs.summaries[grid](x, where, lambdas, states, *sizes, **switches, num_warps=4)
    start = None if state is None else _by_mode(state, modes)
    _carry(states, start, lambdas, positions, backward=False)
    out = torch.empty(rows, length, width, dtype=x.dtype, device=x.device)
    final = torch.empty(rows, modes, width, dtype=torch.float32, device=x.device)
    programs.forward[grid](
        x, where, lambdas, weights, x if skip is None else skip, states, out, final, *sizes,
        SKIP=skip is not None, **switches, num_warps=4,
    )  # fmt: skip
    return out, final[:, : poles.shape[1]].transpose(1, 2).contiguous(), states


@modal.register_fake
def _(
    x: Tensor,
    poles: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    state: Tensor | None,
    positions: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, length, width = x.shape[0], x.shape[1], poles.shape[0]
    modes = _power(poles.shape[1])
    return (
        x.new_empty(rows, length, width),
        poles.new_empty(rows, *poles.shape, dtype=torch.float32),
        poles.new_empty(rows, -(-length // CHUNK), modes, width, dtype=torch.float32),
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, the poles, the residues, the skip and the state before the rows."""
    x, width, modes, chunks = _sizes(x, poles, gated)
    rows, length = x.shape[:2]
    grad = grad.contiguous()
    lambdas, weights = _by_mode(poles, modes), _by_mode(residues, modes)
    final = grad if grad_final is None else _by_mode(grad_final, modes)
    slopes, adjoints = torch.empty_like(states), torch.empty_like(states)
    sizes = (length, width, chunks, x.stride(0), x.stride(1))
    where = x if positions is None else positions.contiguous()
    switches = {**_switches(gated, positions, modes), "FINAL": grad_final is not None}
    grid = (chunks, -(-width // CHANNELS), rows)
    programs = _programs()
    programs.backward_summaries[grid](
        grad, final, x, where, lambdas, weights, states, slopes, adjoints, *sizes, **switches,
        num_warps=4,
    )  # fmt: skip
    _carry(slopes, None, lambdas, positions, backward=False)
    before = _carry(adjoints, None, lambdas, positions, backward=True)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(rows, chunks, 2, modes, width, dtype=torch.float32, device=x.device)
    skipped = x.new_empty(rows, chunks, width if skip is not None else 0, dtype=torch.float32)
    programs.backward[grid](
        grad, final, x, where, lambdas, weights, x if skip is None else skip, states, slopes,
        adjoints, grad_x, partial, skipped, *sizes, SKIP=skip is not None, **switches, num_warps=4,
    )  # fmt: skip
    own = slice(poles.shape[1])
    of_residues, of_poles = partial.sum((0, 1))[:, own].transpose(1, 2)
    return (
        grad_x,
        of_poles.contiguous(),
        of_residues.contiguous(),
        skipped.sum((0, 1)),
        before[:, own].transpose(1, 2).contiguous(),
    )


@_backward.register_fake
def _(
    grad: Tensor,
    grad_final: Tensor | None,
    x: Tensor,
    poles: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    states: Tensor,
    positions: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        poles.new_empty(poles.shape, dtype=torch.float32),
        poles.new_empty(poles.shape, dtype=torch.float32),
        x.new_empty(0 if skip is None else skip.shape[0], dtype=torch.float32),
        poles.new_empty(x.shape[0], *poles.shape, dtype=torch.float32),
    )


def _carry(
    states: Tensor,
    start: Tensor | None,
    lambdas: Tensor,
    positions: Tensor | None,
    *,
    backward: bool,
) -> Tensor:
    """What the chunks add becomes, in place, what comes into them. Returns what comes out."""
    rows, chunks, modes, width = states.shape
    unbroken = states.new_ones(rows, chunks)
    if positions is not None:  # no document begins in the chunk
        padded = F.pad(positions, (0, chunks * CHUNK - positions.shape[1]), value=1)
        unbroken = (padded != 0).unflatten(1, (chunks, CHUNK)).all(-1).float()
    end = torch.empty(rows, modes, width, dtype=torch.float32, device=states.device)
    numbers = modes * width
    _programs().carry[(-(-numbers // BLOCK), rows)](
        states, states if start is None else start, lambdas, unbroken, end, width, chunks, numbers,
        START=start is not None, BACKWARD=backward, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return end


def _sizes(x: Tensor, poles: Tensor, gated: bool) -> tuple[Tensor, int, int, int]:
    x = by_token(x)
    width = x.shape[2] // 3 if gated else x.shape[2]
    return x, width, _power(poles.shape[1]), -(-x.shape[1] // CHUNK)


def _power(modes: int) -> int:
    return 1 << (modes - 1).bit_length()


def _by_mode(x: Tensor, modes: int) -> Tensor:
    """[…, width, N] → fp32 […, modes, width], with zeros for those that are not."""
    return F.pad(x.float(), (0, modes - x.shape[-1])).transpose(-1, -2).contiguous()


def _switches(gated: bool, positions: Tensor | None, modes: int) -> dict[str, Any]:
    return {
        "GATED": gated,
        "PACKED": positions is not None,
        "MODES": modes,
        "CHUNK": CHUNK,
        "UNROLL": UNROLL,
        "CHANNELS": CHANNELS,
    }


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, poles, residues, skip, state, positions, ctx.gated = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.has_state = state is not None
    ctx.save_for_backward(x, poles, residues, skip, output[2], positions)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_final: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    x, poles, _, skip, _, _ = ctx.saved_tensors
    if grad is None:
        grad = x.new_zeros(*x.shape[:2], len(poles))
    grad_x, *others = _backward(grad, grad_final, *ctx.saved_tensors, ctx.gated)
    of_poles, of_residues, of_skip, before = others
    return (
        grad_x,
        of_poles.to(poles.dtype),
        of_residues.to(ctx.saved_tensors[2].dtype),
        None if skip is None else of_skip.to(skip.dtype),
        before if ctx.has_state else None,
        None,
        None,
    )


modal.register_autograd(_differentiate, setup_context=_keep)
