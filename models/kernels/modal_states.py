"""States of modal.py from chunk to chunk of a row, for its confirmed and its next programs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..parallel.groups import find_axis
from ..parallel.states import receive_state
from .constants import constant
from .launch import Programs

STATE_BLOCK = 256
"""State numbers per program in the scan over chunks."""
AHEAD = 8
"""Chunks loaded ahead."""


@cache
def _programs() -> Any:
    from .programs import modal

    return Programs(modal)


def scan_states(
    states: Tensor,
    initial: Tensor | None,
    rates: Tensor,
    unbroken: Tensor,
    length: int,
    chunk_tokens: int,
    axis: str,
    *,
    backward: bool,
) -> Tensor:
    """Replace each chunk's contribution in `states` by the state at its start. Return the final
    state [rows, modes, width]."""
    rows, chunks, modes, width = states.shape
    state_numbers = modes * width
    tokens = (chunk_tokens, length - (chunks - 1) * chunk_tokens)
    chunk_decays = torch.exp(rates * constant(_negative_lengths, *tokens, rates.device))

    def scan(initial: Tensor | None, *, write: bool) -> Tensor:
        final = states.new_empty(rows, modes, width)
        _programs().modal_scan_states[(-(-state_numbers // STATE_BLOCK) * rows,)](
            states, states if initial is None else initial, chunk_decays, unbroken, final, chunks,
            state_numbers, START=initial is not None, BACKWARD=backward, WRITE=write,
            BLOCK=STATE_BLOCK, AHEAD=AHEAD,
        )  # fmt: skip
        return final

    if (context := find_axis(axis)).size > 1:
        rank_decay = torch.exp(-rates * length) * unbroken.prod(1)[:, None, None]
        received = receive_state(scan(initial, write=False), rank_decay, context, backward=backward)
        initial = received if initial is None else initial + received
    return scan(initial, write=True)


def _negative_lengths(chunk: int, last_chunk: int, device: torch.device) -> Tensor:
    """Return −chunk and −last_chunk, fp32 [2, 1, 1], without a copy from the host."""
    index = torch.arange(2, device=device, dtype=torch.float32).view(2, 1, 1)
    return index * (chunk - last_chunk) - chunk


def unbroken_chunks(x: Tensor, positions: Tensor | None, chunk_tokens: int) -> Tensor:
    """Return fp32 [rows, chunks]: 1 if no document begins in the chunk, else 0."""
    length = x.shape[1]
    chunks = -(-length // chunk_tokens)
    if positions is None:
        return x.new_ones(len(x), chunks, dtype=torch.float32)
    if num_missing := chunks * chunk_tokens - length:
        positions = F.pad(positions, (0, num_missing), value=1)
    unbroken: Tensor = (positions != 0).unflatten(1, (chunks, chunk_tokens)).all(-1)
    return unbroken.float()


def modes_first(x: Tensor, padded_modes: int) -> Tensor:
    """Map […, width, N] to fp32 […, held, width], padded with zeros."""
    x = x.float()
    if num_missing := padded_modes - x.shape[-1]:
        x = F.pad(x, (0, num_missing))
    return x.transpose(-1, -2).contiguous()


def channels_first(x: Tensor, modes: int) -> Tensor:
    """Invert `modes_first`."""
    by_channel: Tensor = x.transpose(-1, -2)[..., :modes]
    return by_channel.clone(memory_format=torch.contiguous_format)
