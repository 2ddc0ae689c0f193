"""Sizes, options and launches of ssd.py's programs.

A model's layers call with equal sizes, step after step: launches are bound to them once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd
from typing import Any

from .launch import Launch, Programs, keep_bound
from .ssd_limits import tile_side

Strides = tuple[int, int]
"""Distances from a row to the next, and from a token to the next."""
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
FP32_PARTS = 2
"""Parts of a chunk that are chunks of their own in ssd_outputs in fp32, with four warps: whole
chunks need a quarter more instructions and twice the time to compile."""


@cache
def _programs() -> tuple[Programs, Programs]:
    from .programs import ssd, ssd_backward

    return Programs(ssd), Programs(ssd_backward)


@dataclass(frozen=True, eq=False)
class Sizes:
    """A call's sizes, and what follows from them."""

    rows: int
    length: int
    heads: int
    groups: int
    head_dim: int
    state_size: int
    packed: bool
    fp32: bool
    xBC_strides: Strides = (0, 0)
    dt_strides: Strides = (0, 0)

    @cached_property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @cached_property
    def widths(self) -> tuple[int, int, int]:
        """Widths of x, B and C."""
        BC_width = self.groups * self.state_size
        return self.inner, BC_width, BC_width

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
    def state_numbers(self) -> int:
        """State numbers per head."""
        return self.head_dim * self.state_size

    @cached_property
    def num_state_blocks(self) -> int:
        """Programs that scan one head's state."""
        return -(-self.state_numbers // STATE_BLOCK)

    @cached_property
    def heads_per_program(self) -> int:
        """Heads over which a program sums dB and dC."""
        return gcd(self.heads_per_group, MAX_HEADS)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of so many heads."""
        return self.heads // self.heads_per_program

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
    def grid(self) -> tuple[int, int, int]:
        return self.spans, self.heads, self.rows

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


@keep_bound
def find_sizes(
    shape: tuple[int, int, int],
    heads: int,
    head_dim: int,
    state_size: int,
    packed: bool,
    fp32: bool,
    xBC_strides: tuple[int, int, int] = (0, 0, 0),
    dt_strides: tuple[int, int, int] = (0, 0, 0),
) -> Sizes:
    """Return the sizes of a call with xBC of this shape: the same object for equal arguments."""
    rows, length, width = shape
    groups = (width - heads * head_dim) // (2 * state_size)
    return Sizes(
        rows, length, heads, groups, head_dim, state_size, packed, fp32, xBC_strides[:2],
        dt_strides[:2],
    )  # fmt: skip


@keep_bound
def bind_delta(sizes: Sizes) -> Launch:
    return _programs()[0].bind(
        "ssd_delta", (sizes.chunks, -(-sizes.heads // DELTA_HEADS), sizes.rows), sizes.length,
        sizes.heads, sizes.padded_length, *sizes.dt_strides, CHUNK=CHUNK, HEADS=DELTA_HEADS,
    )  # fmt: skip


@keep_bound
def bind_span_states(sizes: Sizes, value_strides: Strides, *, backward: bool) -> Launch:
    return _programs()[0].bind(
        "ssd_span_states", sizes.grid, *sizes.span_arguments, *value_strides, *sizes.xBC_strides,
        BACKWARD=backward, **sizes.constants, **OPTIONS,
    )  # fmt: skip


@keep_bound
def bind_scan_states(sizes: Sizes, *, start: bool, backward: bool, write: bool) -> Launch:
    return _programs()[0].bind(
        "ssd_scan_states", (sizes.num_state_blocks, sizes.heads, sizes.rows), sizes.spans,
        sizes.heads, sizes.state_numbers, START=start, BACKWARD=backward, WRITE=write,
        BLOCK=STATE_BLOCK, AHEAD=AHEAD,
    )  # fmt: skip


@keep_bound
def bind_outputs(
    sizes: Sizes, value_strides: Strides, out_strides: Strides, *, backward: bool
) -> Launch:
    """Bind the program of y, or of dx."""
    constants = {**sizes.constants, "SUM_TOKENS": CHUNK, **OPTIONS}
    if sizes.fp32:
        constants |= {"CHUNK": CHUNK // FP32_PARTS, "CHUNKS": CHUNKS * FP32_PARTS, **PAIR_OPTIONS}
    return _programs()[0].bind(
        "ssd_outputs", sizes.grid, *sizes.span_arguments, *value_strides, *sizes.xBC_strides,
        *out_strides, BACKWARD=backward, **constants,
    )  # fmt: skip


@keep_bound
def bind_pairs(sizes: Sizes, dy_strides: Strides, *, same_chunk: bool) -> Launch:
    num_columns = sizes.num_blocks * (1 if same_chunk else CHUNKS - 1)
    return _programs()[1].bind(
        "ssd_backward_pairs", (sizes.chunks, num_columns, sizes.rows), sizes.length,
        sizes.padded_length, sizes.heads, sizes.heads_per_group, sizes.head_dim, sizes.state_size,
        *dy_strides, *sizes.xBC_strides, SAME=same_chunk, HEADS=sizes.heads_per_program,
        **sizes.constants, **PAIR_OPTIONS,
    )  # fmt: skip


@keep_bound
def bind_BC(sizes: Sizes, value_strides: Strides, *, backward: bool) -> Launch:
    return _programs()[1].bind(
        "ssd_backward_BC", (sizes.chunks, sizes.num_blocks, sizes.rows), *sizes.span_arguments,
        *value_strides, *sizes.xBC_strides, BACKWARD=backward, HEADS=sizes.heads_per_program,
        **sizes.constants, **OPTIONS,
    )  # fmt: skip


@keep_bound
def bind_sum_BC(sizes: Sizes, out_strides: Strides) -> Launch:
    return _programs()[1].bind(
        "ssd_backward_sum_BC", (sizes.chunks, 2 * sizes.groups, sizes.rows), sizes.length,
        sizes.num_blocks // sizes.groups, sizes.state_size, *out_strides, CHUNK=CHUNK,
        STATE_SIZE=tile_side(sizes.state_size),
    )  # fmt: skip


@keep_bound
def bind_dt(sizes: Sizes) -> Launch:
    return _programs()[1].bind(
        "ssd_backward_dt", (sizes.spans, -(-sizes.heads // DELTA_HEADS), sizes.rows), sizes.length,
        sizes.heads, sizes.padded_length, sizes.spans, sizes.num_state_blocks, *sizes.dt_strides,
        CHUNK=CHUNK, CHUNKS=CHUNKS, HEADS=DELTA_HEADS,
    )  # fmt: skip
