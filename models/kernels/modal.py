"""Hyena-LI's gated modal form: a scan over N real states per channel, without an FFT.

    S_t = λ·S_{t−1} + w_t,  y_t = q_t·(Σ_n R_n·S_{n,t} + skip·w_t),  w = k ⊙ v,  λ = e^{−rate}

Within a token block the filter is a product with its first taps, and between blocks the states are
scanned: matrix products, and one state number per token. Rows are cut into chunks. The summary pass
computes each chunk's contribution to the states; a scan over the chunks turns the contributions
into the states at each chunk's start; a second pass reads these and writes the outputs: five
tensors read and one written, where there are four.

In the backward pass, the input gradients are the same filter run from the end, and the state
gradients are scanned in the same way; the second pass reads both, and computes the gradients for
rates and residues from their products. The forward pass keeps the states at every tile's start. The
twin is `gated_modal` in models/layers/gated_convolution.py.

Inputs, and the gradients that reach them through a gate, are rounded to x's dtype. Everything else
has fp32 precision or little less: residues may be large, and cancel each other.

Under context parallelism the op exchanges states between a row's ranks: the states forward, and
their gradients backward, after the summary pass and before the scan over chunks.

An H100 ran these programs at .24 and .20 of a copy's rate, though their instructions would take a
seventh of that time: they wait at barriers, with 8 warps on a multiprocessor. `kernels.modal: next`
(modal_next.py) has a scan in registers: 1.6 and 1.9 times the instructions, no barriers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import modal_next
from .constants import constant
from .launch import Programs
from .layout import split_tiles, to_channels_last
from .modal_states import channels_first, modes_first, scan_states, unbroken_chunks
from .op import op

MAX_MODES = 32
"""Kernel limit: states per channel."""
BLOCK = 16
"""Tokens per block; the row length must be a multiple."""
BLOCKS = 16
"""Blocks per tile."""
TOKEN_BYTES = 32
"""Bytes that a program reads per token, one memory access; halved above 16 states, and once more in
the backward pass, whose numbers do not fit the registers otherwise."""
MODES_PER_WARP = 16
"""States per warp and channel: more states are divided into parts."""
WARPS = 8


@cache
def _programs() -> Any:
    from .programs import modal

    return Programs(modal)


def unsupported_reason(rates: Tensor, length: int, axis: str) -> str | None:
    """Return why the kernel does not support rates [width, N], or row shards with this length on
    the named axis; else None."""
    if rates.is_complex():
        return "it supports real poles, and these are complex"
    if rates.shape[1] > MAX_MODES:
        return f"a channel has {rates.shape[1]} states, and the limit is {MAX_MODES}"
    if axis and length % BLOCK:
        return f"a rank has {length} tokens of a row, and it needs a multiple of {BLOCK}"
    return None


@op("modal")
def modal(
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    state: Tensor | None,
    positions: Tensor | None,
    gated: bool,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y [rows, length, width], the final state [rows, width, N] and, for the backward pass,
    the states at tile starts [rows, tiles, modes, width], modes being N padded to a matrix's side.

    x [rows, length, width], or [rows, length, 3·width] if `gated`: q, k and v; rates and residues
    [width, N], skip [width], state [rows, width, N], positions [rows, length] for packed rows.
    `axis` names the context axis that shards the rows, or is empty; with an axis, the final state
    has no gradient.
    """
    if modal_next.runs():
        return modal_next.forward(x, rates, residues, skip, state, positions, gated, BLOCK, axis)
    x, position_ids, filters, sizes, constants, grid = _launch_layout(
        x, rates, residues, skip, positions, gated, TOKEN_BYTES
    )
    (rows, length), (width, modes), chunks = x.shape[:2], rates.shape, sizes[3]
    padded_modes, chunk_tokens = _padded_modes(modes), sizes[2] * BLOCK * BLOCKS
    unbroken = unbroken_chunks(x, positions, chunk_tokens)
    chunk_states = x.new_empty(rows, chunks, padded_modes, width, dtype=torch.float32)
    states = x.new_empty(_states_shape(x, rates), dtype=torch.float32)
    out = torch.empty(rows, length, width, dtype=x.dtype, device=x.device)
    programs, strides = _programs(), x.stride()[:2]
    left, right = (x[..., width:], x[..., 2 * width :]) if gated else (x, x)
    programs.modal_chunk_states[grid](
        left, right, position_ids, *filters[:2], chunk_states, *sizes, *strides, *strides,
        BACKWARD=False, **constants,
    )  # fmt: skip
    initial = None if state is None else modes_first(state, padded_modes)
    final_state = scan_states(
        chunk_states, initial, filters[0], unbroken, length, chunk_tokens, axis, backward=False
    )
    programs.modal_forward[grid](
        x, position_ids, *filters, chunk_states, states, out, *sizes, *strides, **constants
    )
    return out, channels_first(final_state, modes), states


@modal.register_fake
def _(x: Tensor, rates: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    (rows, length), (width, modes) = x.shape[:2], rates.shape
    return (
        x.new_empty(rows, length, width),
        x.new_empty(rows, width, modes, dtype=torch.float32),
        x.new_empty(_states_shape(x, rates), dtype=torch.float32),
    )


@op("modal_backward")
def _backward(
    dy: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    states: Tensor,
    positions: Tensor | None,
    gated: bool,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients for x, rates, residues, skip and the initial state."""
    if modal_next.runs():
        return modal_next.backward(
            dy, grad_final_state, x, rates, residues, skip, states, positions, gated, BLOCK, axis
        )
    x, position_ids, filters, sizes, constants, grid = _launch_layout(
        x, rates, residues, skip, positions, gated, TOKEN_BYTES // 2
    )
    dy = dy.contiguous()
    rows, (width, modes), chunks, padded_modes = len(x), rates.shape, sizes[3], states.shape[2]
    chunk_grads = x.new_empty(rows, chunks, padded_modes, width, dtype=torch.float32)
    pair_sums = x.new_empty(rows, chunks, width, BLOCK, BLOCK, dtype=torch.float32)
    state_sums = x.new_empty(rows, chunks, 2, padded_modes, width, dtype=torch.float32)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    programs, strides = _programs(), x.stride()[:2]
    programs.modal_chunk_states[grid](
        dy, x, position_ids, *filters[:2], chunk_grads, *sizes, *dy.stride()[:2], *strides,
        BACKWARD=True, **constants,
    )  # fmt: skip
    chunk_tokens = sizes[2] * BLOCK * BLOCKS
    unbroken = unbroken_chunks(x, positions, chunk_tokens)
    grad_end = None if grad_final_state is None else modes_first(grad_final_state, padded_modes)
    grad_state = scan_states(
        chunk_grads, grad_end, filters[0], unbroken, x.shape[1], chunk_tokens, axis, backward=True
    )
    programs.modal_backward[grid](
        dy, x, position_ids, *filters, states, chunk_grads, grad_x, pair_sums, state_sums, *sizes,
        *strides, **constants,
    )  # fmt: skip
    # The gradient of a tap is the sum over all pairs at its distance; w has the columns.
    tap_grads = _sum_by_distance(pair_sums.sum((0, 1)))
    decay_sums, lag_sums = channels_first(state_sums.sum((0, 1)), modes).unbind()
    block_decays = _block_decays(rates)
    block_grads = block_decays * tap_grads.unsqueeze(1)
    grad_residues = decay_sums * block_decays[..., 1] + block_grads.sum(2)
    lag_grads = (block_grads * constant(_lags, BLOCK, 1, x.device)).sum(2)
    grad_rates = -lag_sums - residues.float() * lag_grads
    return (
        grad_x,
        grad_rates,
        grad_residues,
        tap_grads[:, 0].clone(),
        channels_first(grad_state, modes),
    )


@_backward.register_fake
def _(
    dy: Tensor, grad_final: Tensor | None, x: Tensor, rates: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = rates.new_empty(rates.shape, dtype=torch.float32)
    return (
        x.new_empty(x.shape),
        like,
        torch.empty_like(like),
        rates.new_empty(len(rates), dtype=torch.float32),
        rates.new_empty(len(x), *rates.shape, dtype=torch.float32),
    )


def _sum_by_distance(pair_sums: Tensor) -> Tensor:
    """Sum [width, BLOCK, BLOCK] over all pairs with tokens at the same distance, [width, BLOCK]:
    over anti-diagonals, because a pair's rows count from the block's end."""
    # Each row is moved one number further than the row above: anti-diagonals become columns.
    shifted = F.pad(pair_sums, (0, BLOCK)).flatten(1)[:, :-BLOCK].unflatten(1, (BLOCK, -1))
    by_distance: Tensor = shifted.sum(1)[:, :BLOCK].flip(1)
    return by_distance


def _launch_layout(
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    positions: Tensor | None,
    gated: bool,
    token_bytes: int,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[int, ...], dict[str, Any], tuple[int]]:
    x = to_channels_last(x)
    (rows, length), (width, modes) = x.shape[:2], rates.shape
    assert length % BLOCK == 0, length
    padded_modes = _padded_modes(modes)
    modes_parts = padded_modes // MODES_PER_WARP
    channels = token_bytes // x.itemsize // modes_parts
    num_columns = rows * -(-width // channels)
    chunks, tiles_per_chunk = split_tiles(-(-length // (BLOCK * BLOCKS)), num_columns)
    taps = (residues.float().unsqueeze(-1) * _block_decays(rates)).sum(1)
    if skip is not None:
        taps[:, 0] += skip
    fp32 = x.dtype == torch.float32  # fp32 inputs take two terms, half precision one
    constants = {
        "GATED": gated,
        "PACKED": positions is not None,
        "BLOCK": BLOCK,
        "BLOCKS": BLOCKS,
        "LEVELS": BLOCKS.bit_length() - 1,
        "CHANNELS": channels,
        "MODES": MODES_PER_WARP,
        "PARTS": modes_parts,
        "INPUTS": 2 if fp32 else 1,
        "POWERS": 2 if fp32 else 3,
        "num_warps": WARPS,
        "num_stages": 1,
    }
    position_ids = x if positions is None else positions.contiguous()
    filters = (modes_first(rates, padded_modes), modes_first(residues, padded_modes), taps)
    return (
        x,
        position_ids,
        filters,
        (length, width, tiles_per_chunk, chunks),
        constants,
        (num_columns * chunks,),
    )


def _block_decays(rates: Tensor) -> Tensor:
    """Return λ^t, fp32 [width, N, BLOCK]."""
    return torch.exp(rates.float().unsqueeze(-1) * constant(_lags, BLOCK, -1, rates.device))


def _lags(block: int, sign: int, device: torch.device) -> Tensor:
    return sign * torch.arange(block, device=device, dtype=torch.float32)


def _states_shape(x: Tensor, rates: Tensor) -> tuple[int, int, int, int]:
    """Return the shape of the states at tile starts [rows, tiles, modes, width]."""
    if modal_next.runs():
        return modal_next.states_shape(x, rates)
    width, modes = rates.shape
    return len(x), -(-x.shape[1] // (BLOCK * BLOCKS)), _padded_modes(modes), width


def _padded_modes(modes: int) -> int:
    """Return the state count, padded to a matrix side."""
    return max(16, 1 << (modes - 1).bit_length())


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, rates, residues, skip, state, positions, ctx.gated, ctx.axis = inputs
    ctx.mark_non_differentiable(*output[1 if ctx.axis else 2 :])
    ctx.set_materialize_grads(False)
    ctx.has_state = state is not None
    ctx.save_for_backward(x, rates, residues, skip, output[2], positions)


def _autograd_backward(
    ctx: Any, dy: Tensor | None, grad_final_state: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    x, rates, residues, skip, _, _ = saved
    if dy is None:
        dy = x.new_zeros(*x.shape[:2], len(rates))
    grad_x, grad_rates, grad_residues, grad_skip, grad_state = _backward(
        dy, grad_final_state, *saved, ctx.gated, ctx.axis
    )
    return (
        grad_x,
        grad_rates.to(rates.dtype),
        grad_residues.to(residues.dtype),
        None if skip is None else grad_skip.to(skip.dtype),
        grad_state if ctx.has_state else None,
        *(None, None, None),
    )


modal.register_autograd(_autograd_backward, setup_context=_setup_context)
