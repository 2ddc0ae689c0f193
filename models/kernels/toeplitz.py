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

from .layout import split_tiles, to_channels_last
from .op import op

CHUNK = 64
"""Side of a block: the rows of one instruction of the matrix units. In fp32 half of it: three
products need the registers and the shared memory of two numbers for each number."""
REACHES = 4 * CHUNK + 1
"""Taps of the longest filter: five passes."""
REGISTERS = 255
"""Registers of a thread in the backward pass: the maximum. Without this setting, an assembler for
sm_80 was seen to take 32, which do not suffice."""
NEAR, FIRST = 3 * CHUNK, 2 * CHUNK
"""Tokens that the blocks of a filter span: up to NEAR, one program of the backward pass holds the
sums for the gradients of all of them in registers; beyond, for those of the FIRST tokens, and a
second program for the others."""
OPTIONAL = ("HISTORY", "SKIP", "PACKED")


@cache
def _programs() -> Any:
    from .programs import toeplitz

    return toeplitz


@cache
def _programs_backward() -> Any:
    from .programs import toeplitz_backward

    return toeplitz_backward


def unsupported_reason(taps: Tensor, *, bias: bool = False, silu: bool = False) -> str | None:
    """Return why the kernel cannot compute this filter, or None."""
    if taps.shape[1] > REACHES:
        return f"the filter has {taps.shape[1]} taps, and the limit is {REACHES}"
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
    """Filter x [rows, length, width or 3·width]; taps [groups, K], history [rows, K−1, width]."""
    x = to_channels_last(x)
    length, width, switches = _laid_out(x, taps, (history, skip, positions), gated, of_chunk=2)
    history_, skip_, positions_ = _given(x, history, skip, positions)
    columns = taps.shape[0] * switches["BLOCKS"] * len(x)
    parts, each = split_tiles(_tiles(length, switches), columns)
    out = torch.empty(len(x), length, width, dtype=x.dtype, device=x.device)
    _programs().toeplitz_forward[(parts * columns,)](
        x, history_, taps.to(x.dtype).contiguous(), skip_, positions_, out, length, width,
        x.stride(0), x.stride(1), parts, each, **switches, num_stages=1,
    )  # fmt: skip
    return out


@toeplitz.register_fake
def _(x: Tensor, taps: Tensor, *others: Any) -> Tensor:
    gated = others[3]
    return x.new_empty(*x.shape[:2], x.shape[2] // 3 if gated else x.shape[2])


@op("toeplitz_backward")
def _backward(
    grad: Tensor,
    x: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    history: Tensor | None,
    positions: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, the taps (fp32), the skip (fp32) and the history."""
    x = x.contiguous()
    length, width, switches = _laid_out(x, taps, (history, skip, positions), gated, of_chunk=4)
    history_, skip_, positions_ = _given(x, history, skip, positions)
    rows, groups = len(x), taps.shape[0]
    blocks, passes, chunk = (switches[name] for name in ("BLOCKS", "PASSES", "CHUNK"))
    before = (passes - 1) * chunk if history is not None else 0
    parts, each = split_tiles(_tiles(length + before, switches), groups * blocks * rows)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_history = x.new_empty(0) if history is None else torch.empty_like(history_)
    shape = (rows * parts, groups, blocks, passes, chunk, chunk)
    met = torch.empty(shape, dtype=torch.float32, device=x.device)
    partial = x.new_empty(rows * parts, width if skip is not None else 0, dtype=torch.float32)
    near = passes if passes * chunk <= NEAR else FIRST // chunk
    switches |= {"SUMS": near, "num_warps": 4, "num_stages": 1, "maxnreg": REGISTERS}
    grad, programs, grid = grad.contiguous(), _programs_backward(), parts * groups * blocks * rows
    programs.toeplitz_backward[(grid,)](
        grad, x, history_, taps.to(x.dtype).contiguous(), skip_, positions_, grad_x, grad_history,
        met, partial, length, width, parts, each, **switches,
    )  # fmt: skip
    if near < passes:
        programs.toeplitz_backward_far_sums[(grid,)](
            grad, x, history_, positions_, met, length, width, parts, each, **switches
        )
    return grad_x, diagonals(met.sum((0, 2)), taps.shape[1]), partial.sum(0), grad_history


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


def diagonals(met: Tensor, reach: int) -> Tensor:
    """Map [groups, passes, t, s] to [groups, K]: sum all with t − s + pass · CHUNK = k."""
    side = met.shape[3]
    # Each row is moved one number further than the row above: diagonals become columns.
    apart = F.pad(met.flip(-1), (0, side)).flatten(2)[..., :-side]
    sums = apart.unflatten(2, (side, 2 * side - 1)).sum(2)  # of t − s, from 1 − side
    lags = sums[..., side - 1 :].clone()
    lags[:, :-1, 1:] += sums[:, 1:, : side - 1]
    taps: Tensor = lags.flatten(1)[:, :reach].contiguous()
    return taps


def _given(x: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return [x if t is None else t.contiguous() for t in tensors]


def _tiles(length: int, switches: dict[str, Any]) -> int:
    """Return the tiles of a row; a tile is the tokens that a program processes at a time."""
    tokens: int = switches["CHUNK"] * switches["CHUNKS"]
    return -(-length // tokens)


def _laid_out(
    x: Tensor,
    taps: Tensor,
    given: tuple[Tensor | None, ...],
    gated: bool,
    *,
    of_chunk: int,
) -> tuple[int, int, dict[str, Any]]:
    """Return the length, the width, and the constants of a program. Its tiles have as many columns
    as a chunk has tokens, divided by `of_chunk` (16 at least, the side of a product): registers do
    not hold more. `given`: history, skip and positions."""
    length, width = x.shape[1], x.shape[2] // 3 if gated else x.shape[2]
    share = width // taps.shape[0]
    chunk = CHUNK // 2 if x.dtype == torch.float32 else CHUNK
    columns = max(chunk // of_chunk, 16)
    side = min(max(16, 1 << (share - 1).bit_length()), columns)
    passes = max(-(-(taps.shape[1] - 1) // chunk) + 1, 2)
    return (
        length,
        width,
        {
            "SHARE": share,
            "BLOCKS": -(-share // side),
            "REACH": taps.shape[1],
            "PASSES": passes,
            "CHUNK": chunk,
            "CHUNKS": columns // side,
            "SIDE": side,
            "GATED": gated,
            **dict(zip(OPTIONAL, (t is not None for t in given), strict=True)),
            "PRECISION": "tf32x3" if x.dtype == torch.float32 else "ieee",
            "num_warps": 4 if passes * chunk <= NEAR else 8,
        },
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.gated = inputs[5]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    _, taps, skip, history, _ = saved
    grad_x, grad_taps, grad_skip, grad_history = _backward(grad, *saved, ctx.gated)
    return (
        grad_x,
        grad_taps.to(taps.dtype),
        None if skip is None else grad_skip.to(skip.dtype),
        None if history is None else grad_history,
        None,
        None,
    )


toeplitz.register_autograd(_differentiate, setup_context=_keep)
