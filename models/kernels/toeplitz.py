"""Medium causal filters with their gates, as blocks of a Toeplitz matrix on the matrix units.

    y = q ⊙ (h ∗ w + skip ⊙ w),  w = k ⊙ v            Hyena-MR
    Y_n = H₀·W_n + H₁·W_{n−1} + …                      chunks of a row, and blocks of the filter

H₀ holds the lags within a chunk, and the other blocks those that reach into earlier chunks: two
passes for a filter of up to a chunk and a token, one more for each further chunk, so that every
filter is exact. Everything is read from memory and written once; what is needed again stays in
registers or comes from a cache. The twin is `plain` in models/layers/gated_convolution.py.

In bf16 and fp16 the products are of rounded numbers (w and the taps), summed in fp32; in fp32 one
product is three of tf32. The filter's gradient is the sum, over chunks, of G_n·W_{n−p}ᵀ along its
diagonals: it stays in registers until the program ends, which for longer filters are two.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import choice, faults
from .launch import Programs
from .layout import split_tiles, to_channels_last
from .op import op

CHUNK = 64
"""Side of a block: the rows of one instruction of the matrix units. In fp32 half of it: three
products need the registers and the shared memory of two numbers for each number. Half of it, too,
where a compiler is known to fail on whole ones (faults.py)."""
MAX_TAPS = 4 * CHUNK + 1
"""Limit of the kernel: taps of a filter, five passes."""
REGISTERS = 255
"""Registers of a thread in the backward pass: the maximum. Without this setting, an assembler for
sm_80 was seen to take 32, which do not suffice."""
NEAR_TOKENS, FIRST_TOKENS = 3 * CHUNK, 2 * CHUNK
"""Up to NEAR_TOKENS of a filter's blocks, one program of the backward pass holds all sums for their
gradients in registers; beyond, it holds those of FIRST_TOKENS, and a second program the others."""
OPTIONAL_INPUTS = ("HISTORY", "SKIP", "PACKED")


@cache
def _programs() -> Any:
    from .programs import toeplitz

    return Programs(toeplitz)


@cache
def _next_programs() -> Any:
    from .programs import toeplitz_next

    return Programs(toeplitz_next)


@cache
def _programs_backward() -> Any:
    from .programs import toeplitz_backward

    return Programs(toeplitz_backward)


def unsupported_reason(taps: Tensor, *, bias: bool = False, silu: bool = False) -> str | None:
    """Return why the kernel does not support taps [groups, K] or these options, or None."""
    if taps.shape[1] > MAX_TAPS:
        return f"the filter has {taps.shape[1]} taps, and the limit is {MAX_TAPS}"
    if bias or silu:
        return "it has no bias and no SiLU"
    return None


@op("toeplitz")
def toeplitz(
    x: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    history: Tensor | None,
    positions: Tensor | None,
    gated: bool,
) -> Tensor:
    """Return y [rows, length, width] for x [rows, length, width], or [rows, length, 3·width] if
    `gated`: q, k and v. taps [groups, K], skip [width], history [rows, K−1, width], positions
    [rows, length] for packed rows."""
    x = to_channels_last(x)
    length, width, constants = _launch_layout(
        x, taps, (history, skip, positions), gated, columns_divisor=2
    )
    history_, skip_, positions_ = _contiguous_or_placeholder(x, history, skip, positions)
    num_columns = taps.shape[0] * constants["BLOCKS"] * len(x)
    num_parts, tiles_per_part = split_tiles(_num_tiles(length, constants), num_columns)
    out = torch.empty(len(x), length, width, dtype=x.dtype, device=x.device)
    _programs().toeplitz_forward[(num_parts * num_columns,)](
        x, history_, taps.to(x.dtype).contiguous(), skip_, positions_, out, length, width,
        x.stride(0), x.stride(1), num_parts, tiles_per_part, **constants, num_stages=1,
    )  # fmt: skip
    return out


@toeplitz.register_fake
def _(x: Tensor, taps: Tensor, *arguments: Any) -> Tensor:
    gated = arguments[3]
    return x.new_empty(*x.shape[:2], x.shape[2] // 3 if gated else x.shape[2])


@op("toeplitz_backward")
def _backward(
    dy: Tensor,
    x: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    history: Tensor | None,
    positions: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, taps (fp32 [groups, K]), skip (fp32 [width]) and history."""
    x = x.contiguous()
    length, width, constants = _launch_layout(
        x, taps, (history, skip, positions), gated, columns_divisor=4
    )
    history_, skip_, positions_ = _contiguous_or_placeholder(x, history, skip, positions)
    rows, groups = len(x), taps.shape[0]
    num_blocks, num_passes, chunk = (constants[name] for name in ("BLOCKS", "PASSES", "CHUNK"))
    history_tokens = (num_passes - 1) * chunk if history is not None else 0
    num_parts, tiles_per_part = split_tiles(
        _num_tiles(length + history_tokens, constants), groups * num_blocks * rows
    )
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_history = x.new_empty(0) if history is None else torch.empty_like(history_)
    shape = (rows * num_parts, groups, num_blocks, num_passes, chunk, chunk)
    block_sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    skip_grads = x.new_empty(
        rows * num_parts, width if skip is not None else 0, dtype=torch.float32
    )
    num_near = num_passes if num_passes * chunk <= NEAR_TOKENS else FIRST_TOKENS // chunk
    constants |= {"SUMS": num_near, "num_warps": 4, "num_stages": 1, "maxnreg": REGISTERS}
    dy, programs, grid = (
        dy.contiguous(),
        _programs_backward(),
        num_parts * groups * num_blocks * rows,
    )
    program = programs.toeplitz_backward
    if "toeplitz" in choice.NEXT:
        program = _next_programs().toeplitz_backward_carried
    program[(grid,)](
        dy, x, history_, taps.to(x.dtype).contiguous(), skip_, positions_, grad_x, grad_history,
        block_sums, skip_grads, length, width, num_parts, tiles_per_part, **constants,
    )  # fmt: skip
    if num_near < num_passes:
        programs.toeplitz_backward_far_sums[(grid,)](
            dy, x, history_, positions_, block_sums, length, width, num_parts, tiles_per_part,
            **constants,
        )  # fmt: skip
    return (
        grad_x,
        sum_diagonals(block_sums.sum((0, 2)), taps.shape[1]),
        skip_grads.sum(0),
        grad_history,
    )


@_backward.register_fake
def _(
    grad: Tensor, x: Tensor, taps: Tensor, skip: Tensor | None, history: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        taps.new_empty(taps.shape, dtype=torch.float32),
        x.new_empty(0 if skip is None else skip.shape[0], dtype=torch.float32),
        x.new_empty(0) if history is None else history.new_empty(history.shape),
    )


def sum_diagonals(block_sums: Tensor, reach: int) -> Tensor:
    """Map block sums [groups, passes, t, s] to tap gradients [groups, K]: entry k sums all with
    t − s + pass · CHUNK = k."""
    side = block_sums.shape[3]
    # Each row is moved one number further than the row above: diagonals become columns.
    shifted = F.pad(block_sums.flip(-1), (0, side)).flatten(2)[..., :-side]
    lag_sums = shifted.unflatten(2, (side, 2 * side - 1)).sum(2)  # of t − s, from 1 − side
    lag_grads = lag_sums[..., side - 1 :].clone()
    lag_grads[:, :-1, 1:] += lag_sums[:, 1:, : side - 1]
    taps: Tensor = lag_grads.flatten(1)[:, :reach].contiguous()
    return taps


def _contiguous_or_placeholder(x: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return [x if t is None else t.contiguous() for t in tensors]


def _num_tiles(length: int, constants: dict[str, Any]) -> int:
    """Return the tiles of a row; a program processes a tile of tokens at a time."""
    tile_tokens: int = constants["CHUNK"] * constants["CHUNKS"]
    return -(-length // tile_tokens)


def _launch_layout(
    x: Tensor,
    taps: Tensor,
    optional_inputs: tuple[Tensor | None, ...],
    gated: bool,
    *,
    columns_divisor: int,
) -> tuple[int, int, dict[str, Any]]:
    """Return length, width, and the constants of a program. Its tiles have CHUNK / columns_divisor
    columns (at least 16, the side of a product): registers do not hold more. `optional_inputs` are
    history, skip and positions."""
    length, width = x.shape[1], x.shape[2] // 3 if gated else x.shape[2]
    channels_per_group = width // taps.shape[0]
    halves = x.dtype == torch.float32 or faults.has_remedy("toeplitz", x.dtype, choice.TRITON)
    chunk = CHUNK // 2 if halves else CHUNK
    num_columns = max(chunk // columns_divisor, 16)
    channels_per_block = min(max(16, 1 << (channels_per_group - 1).bit_length()), num_columns)
    num_passes = max(-(-(taps.shape[1] - 1) // chunk) + 1, 2)
    return (
        length,
        width,
        {
            "SHARE": channels_per_group,
            "BLOCKS": -(-channels_per_group // channels_per_block),
            "REACH": taps.shape[1],
            "PASSES": num_passes,
            "CHUNK": chunk,
            "CHUNKS": num_columns // channels_per_block,
            "SIDE": channels_per_block,
            "GATED": gated,
            **dict(zip(OPTIONAL_INPUTS, (t is not None for t in optional_inputs), strict=True)),
            "PRECISION": "tf32x3" if x.dtype == torch.float32 else "ieee",
            "num_warps": 4 if num_passes * chunk <= NEAR_TOKENS else 8,
        },
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.gated = inputs[5]


def _autograd_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    _, taps, skip, history, _ = saved
    grad_x, grad_taps, grad_skip, grad_history = _backward(dy, *saved, ctx.gated)
    return (
        grad_x,
        grad_taps.to(taps.dtype),
        None if skip is None else grad_skip.to(skip.dtype),
        None if history is None else grad_history,
        None,
        None,
    )


toeplitz.register_autograd(_autograd_backward, setup_context=_setup_context)
