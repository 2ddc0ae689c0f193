"""Hyena-LI's modal form with its gates: a scan of N real states for each channel, without an FFT.

    S_t = λ·S_{t−1} + w_t,  y_t = q_t·(Σ_n R_n·S_{n,t} + skip·w_t),  w = k ⊙ v,  λ = e^{−rate}

Within a block of tokens the filter is a product with its first taps, and between blocks the states
are scanned: matrix products, and one number of state for each token. Rows are cut into chunks. The
summary pass computes each chunk's contribution to the states; a scan over the chunks turns the
contributions into the states at each chunk's start; a second pass reads these and writes the
outputs: five tensors read and one written, where there are four.

In the backward pass, the gradients of the inputs are the same filter run from the end, and the
gradients of the states are scanned in the same way; the second pass reads both, and computes the
gradients of the rates and residues from their products. The forward pass keeps the states at the
start of every tile. The twin is `gated_modal` in models/layers/gated_convolution.py.

Inputs, and the gradients that reach them through a gate, are rounded to the type of x. Everything
else has the precision of fp32 or little less: residues may be large, and cancel each other.

Under context parallelism the op exchanges states between the ranks of a row: the states forward,
and their gradients backward, after the summary pass and before the scan over chunks.

A scan in registers, compiled for sm_90, has 293 instructions for a token and channel against 147
(packed rows: 306 against 258), no barriers against 71 (147) in a tile of 256 tokens, and writes
four times the states. If a barrier costs 30 clocks, it is equal for rows of one document and takes
0.6 of the time in packed rows, 1% of a step. If a device shows packed rows slower than others by
more than a half, the scan in registers is the better one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..parallel.groups import named
from ..parallel.states import entering
from .layout import split_tiles, to_channels_last
from .op import op

MODES = 32
"""Most states of a channel."""
BLOCK = 16
"""Tokens of a block; the length of a row must be a multiple."""
BLOCKS = 16
"""Blocks of a tile."""
SPAN = 32
"""Bytes of a token that a program reads, the size of one memory access; half of it for more than 16
states, and half of that in the backward pass, whose numbers do not fit the registers otherwise."""
PART = 16
"""States that a warp scans for a channel: more states are divided into parts."""
WARPS = 8
NUMBERS = 256
"""Numbers of state that a program scans over the chunks."""
AHEAD = 8
"""Chunks that it reads ahead."""


@cache
def _programs() -> Any:
    from .programs import modal

    return modal


def unsupported_reason(rates: Tensor, length: int, axis: str) -> str | None:
    """Return why the kernel cannot compute this filter, or rows sharded by an axis; else None."""
    if rates.is_complex():
        return "it supports real poles, and these are complex"
    if rates.shape[1] > MODES:
        return f"a channel has {rates.shape[1]} states, and the limit is {MODES}"
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
    """Return y, the states after the rows, and the states at each tile's start (for backward).

    x [rows, length, width or 3·width], rates and residues [width, N], state [rows, width, N].
    `axis` names the context axis that shards the rows, or is empty; with an axis, the states after
    the rows have no gradient.
    """
    x, where, filters, sizes, switches, grid = _laid_out(
        x, rates, residues, skip, positions, gated, SPAN
    )
    (rows, length), (width, modes), chunks = x.shape[:2], rates.shape, sizes[3]
    held, unbroken = _held(modes), _unbroken(x, positions, sizes)
    between = x.new_empty(rows, chunks, held, width, dtype=torch.float32)
    states = x.new_empty(rows, -(-length // (BLOCK * BLOCKS)), held, width, dtype=torch.float32)
    out = torch.empty(rows, length, width, dtype=x.dtype, device=x.device)
    programs, strides = _programs(), x.stride()[:2]
    first, second = (x[..., width:], x[..., 2 * width :]) if gated else (x, x)
    programs.modal_chunk_states[grid](
        first, second, where, *filters[:2], between, *sizes, *strides, *strides, BACKWARD=False,
        **switches,
    )  # fmt: skip
    start = None if state is None else _by_mode(state, held)
    end = _carry(between, start, filters[0], unbroken, sizes, axis, backward=False)
    programs.modal_forward[grid](
        x, where, *filters, between, states, out, *sizes, *strides, **switches
    )
    return out, _by_channel(end, modes), states


@modal.register_fake
def _(x: Tensor, rates: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    (rows, length), (width, modes) = x.shape[:2], rates.shape
    return (
        x.new_empty(rows, length, width),
        x.new_empty(rows, width, modes, dtype=torch.float32),
        x.new_empty(rows, -(-length // (BLOCK * BLOCKS)), _held(modes), width, dtype=torch.float32),
    )


@op("modal_backward")
def _backward(
    grad: Tensor,
    grad_final: Tensor | None,
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    states: Tensor,
    positions: Tensor | None,
    gated: bool,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, rates, residues, skip, and the state before the rows."""
    x, where, filters, sizes, switches, grid = _laid_out(
        x, rates, residues, skip, positions, gated, SPAN // 2
    )
    grad = grad.contiguous()
    rows, (width, modes), chunks, held = len(x), rates.shape, sizes[3], states.shape[2]
    between = x.new_empty(rows, chunks, held, width, dtype=torch.float32)
    pairs = x.new_empty(rows, chunks, width, BLOCK, BLOCK, dtype=torch.float32)
    sums = x.new_empty(rows, chunks, 2, held, width, dtype=torch.float32)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    programs, strides = _programs(), x.stride()[:2]
    programs.modal_chunk_states[grid](
        grad, x, where, *filters[:2], between, *sizes, *grad.stride()[:2], *strides, BACKWARD=True,
        **switches,
    )  # fmt: skip
    unbroken = _unbroken(x, positions, sizes)
    behind = None if grad_final is None else _by_mode(grad_final, held)
    before = _carry(between, behind, filters[0], unbroken, sizes, axis, backward=True)
    programs.modal_backward[grid](
        grad, x, where, *filters, states, between, grad_x, pairs, sums, *sizes, *strides, **switches
    )
    # The gradient of a tap is the sum over all pairs at its distance; w has the columns.
    of_pairs = pairs.sum((0, 1)).flip(1)
    of_taps = torch.stack([of_pairs.diagonal(-lag, 1, 2).sum(-1) for lag in range(BLOCK)], 1)
    of_decays, of_lags = (_by_channel(each, modes) for each in sums.sum((0, 1)))
    in_block = _decays(rates) * of_taps.unsqueeze(1)
    lags = torch.arange(BLOCK, device=x.device)
    of_residues = of_decays * torch.exp(-rates.float()) + in_block.sum(2)
    of_rates = -of_lags - residues.float() * (in_block * lags).sum(2)
    return grad_x, of_rates, of_residues, of_taps[:, 0].clone(), _by_channel(before, modes)


@_backward.register_fake
def _(
    grad: Tensor, grad_final: Tensor | None, x: Tensor, rates: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = rates.new_empty(rates.shape, dtype=torch.float32)
    return (
        x.new_empty(x.shape),
        like,
        torch.empty_like(like),
        rates.new_empty(len(rates), dtype=torch.float32),
        rates.new_empty(len(x), *rates.shape, dtype=torch.float32),
    )


def _carry(
    states: Tensor,
    start: Tensor | None,
    rates: Tensor,
    unbroken: Tensor,
    sizes: tuple[int, ...],
    axis: str,
    *,
    backward: bool,
) -> Tensor:
    """Replace each chunk's contribution by the states at its start, in place. Return the states
    after the rows."""
    length, _, each, _ = sizes
    rows, chunks, modes, width = states.shape
    numbers, tokens = modes * width, each * BLOCK * BLOCKS
    powers = torch.stack([-rates * tokens, -rates * (length - (chunks - 1) * tokens)]).exp()

    def walk(start: Tensor | None, *, write: bool) -> Tensor:
        end = states.new_empty(rows, modes, width)
        _programs().modal_scan_states[(-(-numbers // NUMBERS) * rows,)](
            states, states if start is None else start, powers, unbroken, end, chunks, numbers,
            START=start is not None, BACKWARD=backward, WRITE=write, BLOCK=NUMBERS, AHEAD=AHEAD,
        )  # fmt: skip
        return end

    if (parts := named(axis)).size > 1:
        kept = torch.exp(-rates * length) * unbroken.prod(1)[:, None, None]
        others = entering(walk(start, write=False), kept, parts, backward=backward)
        start = others if start is None else start + others
    return walk(start, write=True)


def _laid_out(
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    positions: Tensor | None,
    gated: bool,
    span: int,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[int, ...], dict[str, Any], tuple[int]]:
    x = to_channels_last(x)
    (rows, length), (width, modes) = x.shape[:2], rates.shape
    assert length % BLOCK == 0, length
    held = _held(modes)
    parts = held // PART
    channels = span // x.itemsize // parts
    columns = rows * -(-width // channels)
    chunks, each = split_tiles(-(-length // (BLOCK * BLOCKS)), columns)
    taps = (residues.float().unsqueeze(-1) * _decays(rates)).sum(1)
    if skip is not None:
        taps[:, 0] += skip
    whole = x.dtype == torch.float32  # fp32 inputs take two terms, half precision one
    switches = {
        "GATED": gated,
        "PACKED": positions is not None,
        "BLOCK": BLOCK,
        "BLOCKS": BLOCKS,
        "LEVELS": BLOCKS.bit_length() - 1,
        "CHANNELS": channels,
        "MODES": PART,
        "PARTS": parts,
        "INPUTS": 2 if whole else 1,
        "POWERS": 2 if whole else 3,
        "num_warps": WARPS,
        "num_stages": 1,
    }
    where = x if positions is None else positions.contiguous()
    filters = (_by_mode(rates, held), _by_mode(residues, held), taps)
    return x, where, filters, (length, width, each, chunks), switches, (columns * chunks,)


def _unbroken(x: Tensor, positions: Tensor | None, sizes: tuple[int, ...]) -> Tensor:
    """Return fp32 [rows, chunks]: 1 if no document begins in the chunk, else 0."""
    length, _, each, chunks = sizes
    if positions is None:
        return x.new_ones(len(x), chunks, dtype=torch.float32)
    tokens = each * BLOCK * BLOCKS
    padded = F.pad(positions, (0, chunks * tokens - length), value=1)
    on: Tensor = (padded != 0).unflatten(1, (chunks, tokens)).all(-1)
    return on.float()


def _decays(rates: Tensor) -> Tensor:
    """Return λ^t, fp32 [width, N, BLOCK]."""
    return torch.exp(-rates.float().unsqueeze(-1) * torch.arange(BLOCK, device=rates.device))


def _held(modes: int) -> int:
    """Return the number of states, padded to the side of a matrix."""
    return max(16, 1 << (modes - 1).bit_length())


def _by_mode(x: Tensor, held: int) -> Tensor:
    """Map […, width, N] to fp32 […, held, width], padded with zeros."""
    return F.pad(x.float(), (0, held - x.shape[-1])).transpose(-1, -2).contiguous()


def _by_channel(x: Tensor, modes: int) -> Tensor:
    """Reverse `_by_mode`."""
    own: Tensor = x.transpose(-1, -2)[..., :modes]
    return own.clone(memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, rates, residues, skip, state, positions, ctx.gated, ctx.axis = inputs
    ctx.mark_non_differentiable(*output[1 if ctx.axis else 2 :])
    ctx.set_materialize_grads(False)
    ctx.has_state = state is not None
    ctx.save_for_backward(x, rates, residues, skip, output[2], positions)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_final: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    x, rates, residues, skip, _, _ = saved
    if grad is None:
        grad = x.new_zeros(*x.shape[:2], len(rates))
    grad_x, of_rates, of_residues, of_skip, before = _backward(
        grad, grad_final, *saved, ctx.gated, ctx.axis
    )
    return (
        grad_x,
        of_rates.to(rates.dtype),
        of_residues.to(residues.dtype),
        None if skip is None else of_skip.to(skip.dtype),
        before if ctx.has_state else None,
        *(None, None, None),
    )


modal.register_autograd(_differentiate, setup_context=_keep)
