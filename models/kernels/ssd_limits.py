"""Limits of ssd.py's programs, and the sides of their tiles."""

from __future__ import annotations

MAX_HEAD_DIM, MAX_STATE_SIZE = 128, 256
"""Kernel limits: channels per head, and state numbers per channel."""
MAX_STATE_NUMBERS = 128 * 128
"""Kernel limit: state numbers per head."""


def unsupported_reason(head_dim: int, state_size: int) -> str | None:
    """Return why the kernel does not support these sizes, or None."""
    dim, size = tile_side(head_dim), tile_side(state_size)
    if dim > MAX_HEAD_DIM or size > MAX_STATE_SIZE or dim * size > MAX_STATE_NUMBERS:
        return (
            f"heads are {head_dim} wide with {state_size} states for each channel; the limits"
            f" are {MAX_HEAD_DIM} and {MAX_STATE_SIZE}, and {MAX_STATE_NUMBERS} in all"
        )
    return None


def tile_side(size: int) -> int:
    """Round a matrix side up to a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
