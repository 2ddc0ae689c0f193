"""Hyena-LI's gated modal form by its next programs, for `kernels.modal: next`.

A thread holds the states of a channel and walks along tokens: fp32 multiply-adds in registers.
programs/modal_next.py has the equations; passes and gradients are those of modal.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import choice
from .launch import Programs
from .layout import split_tiles, to_channels_last
from .modal_states import scan_states, unbroken_chunks

TILE = 64
"""Tokens per tile; a chunk has whole tiles, and states are kept at the chunks' starts."""
MAX_CHUNK_TILES = 16
"""Upper bound on the tiles of a chunk: within it decays are products of rounded decays."""
CHANNELS = 128
"""Channels per program, one a thread."""
UNROLL = 8
"""Tokens that are loaded together, a power of two; half above 16 states, for which Triton compiles
these programs in three times as long."""
BACKWARD_UNROLL = 4
"""The same where a thread has four and five numbers of each state."""
MIN_WEIGHT = 1e-20
"""Lower bound on the size of weights by which gradients of a final state are divided."""


def runs() -> bool:
    """Return True if the next programs run in this process."""
    return "modal" in choice.NEXT


@cache
def _programs() -> Any:
    from .programs import modal_next

    return Programs(modal_next)


def states_shape(x: Tensor, rates: Tensor) -> tuple[int, int, int, int]:
    """Return the shape of the states at chunk starts [rows, chunks, blocks, modes · CHANNELS]."""
    width, modes = rates.shape
    return len(x), _count_chunks(x, width)[0], -(-width // CHANNELS), modes * CHANNELS


def forward(
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    state: Tensor | None,
    positions: Tensor | None,
    gated: bool,
    block: int,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `modal` does, with the states at the starts of chunks. A row has a multiple
    of `block` tokens."""
    x = to_channels_last(x)
    position_ids, sizes, chunk_tokens, constants, grid = _layout(x, rates, positions, gated, block)
    decays, weights, direct = _filters(rates, residues, skip)
    width = len(rates)
    states = x.new_empty(states_shape(x, rates), dtype=torch.float32)
    _programs().modal_walk_chunk_states[grid](
        x, position_ids, decays, states, *sizes, *x.stride()[:2], **constants
    )
    final_state = scan_states(
        states, None if state is None else _to_blocks(state),
        _to_blocks(rates), unbroken_chunks(x, positions, chunk_tokens), x.shape[1],
        chunk_tokens, axis, backward=False,
    )  # fmt: skip
    out = torch.empty(*x.shape[:2], width, dtype=x.dtype, device=x.device)
    _programs().modal_walk_outputs[grid](
        x, x, position_ids, decays, weights, direct, states, out, states, states, *sizes,
        *x.stride()[:2], *x.stride()[:2], width, BACKWARD=False, **constants,
    )  # fmt: skip
    return out, _from_blocks(final_state, rates.shape), states


def backward(
    dy: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    states: Tensor,
    positions: Tensor | None,
    gated: bool,
    block: int,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients for x, rates, residues, skip and the initial state."""
    x, dy = to_channels_last(x), dy.contiguous()
    position_ids, sizes, chunk_tokens, constants, grid = _layout(x, rates, positions, gated, block)
    decays, weights, direct = _filters(rates, residues, skip)
    modes = rates.shape[1]
    final_grad = None
    if grad_final_state is not None:
        smallest = torch.full_like(weights, MIN_WEIGHT).copysign(weights)
        weights = torch.where(weights.abs() < MIN_WEIGHT, smallest, weights)
        final_grad = _to_blocks(grad_final_state) / weights
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    chunk_grads, decay_sums = torch.empty_like(states), torch.empty_like(states)
    state_sums = states.new_empty(*states.shape[:3], modes + 1, CHANNELS)
    constants["UNROLL"] = _count_unrolled(BACKWARD_UNROLL, modes, block)
    _programs().modal_walk_outputs[grid](
        x, dy, position_ids, decays, weights, direct, states, grad_x, chunk_grads, state_sums,
        *sizes, *x.stride()[:2], *dy.stride()[:2], grad_x.shape[2], BACKWARD=True, **constants,
    )  # fmt: skip
    first_grad = scan_states(
        chunk_grads, final_grad, _to_blocks(rates), unbroken_chunks(x, positions, chunk_tokens),
        x.shape[1], chunk_tokens, axis, backward=True,
    )  # fmt: skip
    _programs().modal_walk_inputs[grid](
        dy, x, position_ids, decays, weights, direct, states, chunk_grads, grad_x, decay_sums,
        *sizes, *x.stride()[:2], **constants,
    )  # fmt: skip
    sums = state_sums.sum((0, 1))
    residue_sums, skip_sums = sums[:, :modes].flatten(1), sums[:, modes].flatten()[: len(rates)]
    return (
        grad_x,
        -_from_blocks(weights * decay_sums.sum((0, 1)), rates.shape),
        skip_sums.unsqueeze(1) + _from_blocks(decays * residue_sums, rates.shape),
        skip_sums.clone(),
        _from_blocks(weights * first_grad, rates.shape),
    )


def _filters(rates: Tensor, residues: Tensor, skip: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return λ and R·λ [blocks, modes · CHANNELS], and Σ R + skip [width]."""
    decays = torch.exp(-_to_blocks(rates))
    direct = residues.float().sum(1)
    if skip is not None:
        direct += skip
    return decays, decays * _to_blocks(residues), direct


def _to_blocks(x: Tensor) -> Tensor:
    """Map […, width, N] to fp32 […, blocks, N · CHANNELS], padded with zeros: a block's channels
    are adjacent for each state, at a distance that programs know."""
    x = x.float()
    if num_missing := -x.shape[-2] % CHANNELS:
        x = F.pad(x, (0, 0, 0, num_missing))
    blocks: Tensor = x.unflatten(-2, (-1, CHANNELS)).transpose(-1, -2).flatten(-2)
    return blocks


def _from_blocks(x: Tensor, shape: torch.Size) -> Tensor:
    """Map […, blocks, N · CHANNELS] to […, width, N]."""
    width, modes = shape
    by_channel: Tensor = x.unflatten(-1, (modes, CHANNELS)).transpose(-1, -2).flatten(-3, -2)
    return by_channel[..., :width, :].contiguous()


def _count_chunks(x: Tensor, width: int) -> tuple[int, int]:
    """Return the chunks of a row, and the tiles of a chunk."""
    tiles, num_columns = -(-x.shape[1] // TILE), len(x) * -(-width // CHANNELS)
    tiles_per_chunk = min(split_tiles(tiles, num_columns)[1], MAX_CHUNK_TILES)
    return -(-tiles // tiles_per_chunk), tiles_per_chunk


def _count_unrolled(tokens: int, modes: int, block: int) -> int:
    return min(tokens if modes <= 16 else max(tokens // 2, 1), block)


def _layout(
    x: Tensor, rates: Tensor, positions: Tensor | None, gated: bool, block: int
) -> tuple[Tensor, tuple[int, ...], int, dict[str, Any], tuple[int]]:
    """Return positions or a placeholder, sizes, tokens per chunk, constants and the grid."""
    (rows, length), (width, modes) = x.shape[:2], rates.shape
    chunks, tiles_per_chunk = _count_chunks(x, width)
    constants = {
        "GATED": gated,
        "PACKED": positions is not None,
        "TILE": TILE,
        "CHANNELS": CHANNELS,
        "MODES": modes,
        "UNROLL": _count_unrolled(UNROLL, modes, block),
        "ALL": width % CHANNELS == 0,
        "num_warps": -(-CHANNELS // 32),
    }
    return (
        x if positions is None else positions.contiguous(),
        (length, width, tiles_per_chunk, chunks),
        tiles_per_chunk * TILE,
        constants,
        (rows * chunks * -(-width // CHANNELS),),
    )
