"""Mamba-2's scan (SSD): matrix products within chunks of tokens, and a state from chunk to chunk.

    S_t = exp(Δ_t·A)·S_{t−1} + Δ_t·x_t⊗B_t,  y_t = S_t·C_t + D·x_t
    Δ = softplus(dt + bias),  A = −exp(A_log)

A program walks along CHUNKS chunks of one head with the state in registers; memory holds the
states at the boundaries of these spans alone. The summary pass computes each span's contribution to
the state, a scan over the spans turns the contributions into the states at the boundaries, and a
second pass writes the outputs. The backward pass scans the gradients of the states from the end in
the same way, and the same programs compute the gradient of x: that of y takes the place of x, and B
and C change places. The gradients of B and C are summed over the heads of a group before they leave
a program. Decays, sums and the scan are fp32; in bf16 and fp16 the products are of rounded numbers,
and the states at the boundaries are rounded to the type of the products.

x, B and C are slices of each token of `mixed`, so that their gradients are one tensor too; dt may
be a slice of a wider tensor. The twin is `plain` in models/layers/mixed_scan.py.

Under context parallelism the op exchanges states between the ranks of a row: the states forward,
and their gradients backward, after the summary pass and before the scan over spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ..parallel.groups import named
from ..parallel.states import entering
from .layout import by_token
from .op import op

CHUNK = 64
CHUNKS = 4
"""Chunks of a span."""
HEADS = 16
"""Most heads over which a program sums the gradients of B and C; a power of two."""
LANES = 16
"""Heads of a program that computes steps."""
WARPS = 8
"""Warps of a program with matrix products: their accumulators fill the registers of four."""
BLOCK = 512
"""Numbers of a state that a program scans over the spans."""
AHEAD = 8
"""Spans that it reads ahead."""
DIMS, SIZES = 128, 256
"""Widest head, and most numbers of state of a channel."""
NUMBERS = 128 * 128
"""Most numbers of state of a head."""


@cache
def _programs() -> Any:
    from .programs import ssd, ssd_backward

    return ssd, ssd_backward


def beyond(dim: int, size: int) -> str | None:
    """Return why the kernel cannot take heads and states of these sizes, or None."""
    dims, sizes = _side(dim), _side(size)
    if dims > DIMS or sizes > SIZES or dims * sizes > NUMBERS:
        return (
            f"heads are {dim} wide with {size} states for each channel; the limits"
            f" are {DIMS} and {SIZES}, and {NUMBERS} in all"
        )
    return None


def _side(size: int) -> int:
    """Return the side of a matrix that holds `size` numbers: a power of two, 16 or more."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a call."""

    rows: int
    length: int
    heads: int
    groups: int
    dim: int
    size: int
    packed: bool
    wide: bool
    """True for fp32 inputs."""

    @property
    def inner(self) -> int:
        return self.heads * self.dim

    @property
    def share(self) -> int:
        """Heads of a group."""
        return self.heads // self.groups

    @property
    def chunks(self) -> int:
        return -(-self.length // CHUNK)

    @property
    def padded(self) -> int:
        return self.chunks * CHUNK

    @property
    def spans(self) -> int:
        return -(-self.chunks // CHUNKS)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Arguments of the programs that work on spans."""
        return self.length, self.padded, self.spans, self.heads, self.share, self.dim, self.size

    @property
    def switches(self) -> dict[str, Any]:
        return {
            "PACKED": self.packed,
            "CHUNK": CHUNK,
            "CHUNKS": CHUNKS,
            "DIM": _side(self.dim),
            "SIZE": _side(self.size),
            "PRECISION": "tf32x3" if self.wide else "ieee",
            "num_warps": WARPS,
            "num_stages": 1,
        }

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.spans, self.heads, self.rows


def _sizes(mixed: Tensor, dt: Tensor, positions: Tensor | None, dim: int, size: int) -> _Sizes:
    (rows, length, width), heads = mixed.shape, dt.shape[2]
    groups = (width - heads * dim) // (2 * size)
    packed, wide = positions is not None, mixed.dtype == torch.float32
    return _Sizes(rows, length, heads, groups, dim, size, packed, wide)


@op("ssd")
def ssd(
    mixed: Tensor,
    dt: Tensor,
    bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    state: Tensor | None,
    positions: Tensor | None,
    dim: int,
    size: int,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y [rows, length, heads · dim], the states after the rows and, for the backward pass,
    the states at each span's start and the decay over each span.

    mixed [rows, length, heads · dim + 2 · groups · size], dt [rows, length, heads], bias, A_log and
    D [heads], state [rows, heads, dim, size]. `axis` names the context axis that shards the rows,
    or is empty.
    """
    sizes = _sizes(mixed, dt, positions, dim, size)
    mixed, dt = by_token(mixed), by_token(dt)
    x, B, C = _split(mixed, sizes)
    steps, totals = _steps(dt, bias, A_log, sizes)
    where = steps if positions is None else positions.contiguous()
    added = _states(steps, sizes)
    keep = steps.new_empty(sizes.rows, sizes.spans, sizes.heads)
    strides, programs = mixed.stride()[:2], _programs()[0]
    programs.summaries[sizes.grid](
        x, B, steps, totals, where, added, keep, *sizes.numbers, *strides, *strides,
        BACKWARD=False, **sizes.switches,
    )  # fmt: skip
    states = _states(mixed, sizes)
    final = _carry(added, states, state, keep, axis)
    out = torch.empty(sizes.rows, sizes.length, sizes.inner, dtype=mixed.dtype, device=mixed.device)
    programs.outputs[sizes.grid](
        x, C, B, steps, totals, D.contiguous(), where, states, out, *sizes.numbers, *strides,
        *strides, *out.stride()[:2], BACKWARD=False, **sizes.switches,
    )  # fmt: skip
    return out, final, states, keep


@ssd.register_fake
def _(
    mixed: Tensor, dt: Tensor, bias: Tensor, A_log: Tensor, D: Tensor, state: Tensor | None,
    positions: Tensor | None, dim: int, size: int, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sizes = _sizes(mixed, dt, positions, dim, size)
    return (
        mixed.new_empty(sizes.rows, sizes.length, sizes.inner),
        mixed.new_empty(sizes.rows, sizes.heads, dim, size, dtype=torch.float32),
        _states(mixed, sizes),
        mixed.new_empty(sizes.rows, sizes.spans, sizes.heads, dtype=torch.float32),
    )


@op("ssd_backward")
def _backward(
    grad: Tensor,
    grad_final: Tensor | None,
    mixed: Tensor,
    dt: Tensor,
    bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    states: Tensor,
    keep: Tensor,
    positions: Tensor | None,
    dim: int,
    size: int,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `mixed` and dt, [3, heads]: of the bias, A_log and D, and that of the
    state before the rows."""
    sizes = _sizes(mixed, dt, positions, dim, size)
    mixed, dt, grad = by_token(mixed), by_token(dt), by_token(grad)
    x, B, C = _split(mixed, sizes)
    steps, totals = _steps(dt, bias, A_log, sizes)
    where = steps if positions is None else positions.contiguous()
    (rows, heads, spans), chunks = (sizes.rows, sizes.heads, sizes.spans), sizes.chunks
    strides, above = mixed.stride()[:2], grad.stride()[:2]
    forward, programs = _programs()
    added, met = _states(steps, sizes), steps.new_empty(rows, spans, heads, _parts(sizes))
    forward.summaries[sizes.grid](
        grad, C, steps, totals, where, added, keep, *sizes.numbers, *above, *strides, BACKWARD=True,
        **sizes.switches,
    )  # fmt: skip
    adjoints = torch.empty_like(states)
    before = _carry(added, adjoints, grad_final, keep, axis, (states, met))
    grad_mixed = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
    grad_x, of_B, of_C = _split(grad_mixed, sizes)
    forward.outputs[sizes.grid](
        grad, B, C, steps, totals, D.contiguous(), where, adjoints, grad_x, *sizes.numbers, *above,
        *strides, *grad_mixed.stride()[:2], BACKWARD=True, **sizes.switches,
    )  # fmt: skip

    of_a_program = gcd(sizes.share, HEADS)
    blocks = sizes.share // of_a_program
    every = sizes.groups * blocks
    outs, directs = steps.new_empty(2, rows, CHUNKS, heads, sizes.padded)
    of_D, entries, exits = steps.new_empty(3, rows, heads, sizes.padded)
    weights = mixed.new_empty(rows, chunks, CHUNKS, every, CHUNK, CHUNK)
    switches = {**sizes.switches, "HEADS": of_a_program}
    squares = {**switches, "num_warps": 4}  # 64 rows are too few for eight warps
    for SAME in (True, False):
        programs.pairs[(chunks, every * (1 if SAME else CHUNKS - 1), rows)](
            grad, x, B, C, steps, totals, where, outs, directs, of_D, weights, sizes.length,
            sizes.padded, heads, sizes.share, dim, size, *above, *strides, SAME=SAME, **squares,
        )  # fmt: skip
    partial = steps.new_empty(every, rows, sizes.length, size)
    for BACKWARD, mine, own, other, ends, scalars, moves, out in (
        (False, grad, C, B, states, entries, above, of_C),
        (True, x, B, C, adjoints, exits, strides, of_B),
    ):
        programs.shared[(chunks, every, rows)](
            mine, own, other, steps, totals, where, ends, weights, scalars, partial,
            *sizes.numbers, *moves, *strides, BACKWARD=BACKWARD, **switches,
        )  # fmt: skip
        programs.collect[(chunks, sizes.groups, rows)](
            partial, out, sizes.length, sizes.groups, blocks, size, *grad_mixed.stride()[:2],
            CHUNK=CHUNK, SIZE=_side(size),
        )  # fmt: skip
    grad_dt = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
    sums = steps.new_empty(rows * spans, 3, heads)
    programs.steps_backward[(spans, -(-heads // LANES), rows)](
        dt, bias.contiguous(), A_log.contiguous(), steps, outs, directs, entries, exits, of_D,
        met, grad_dt, sums, sizes.length, heads, sizes.padded, spans, met.shape[3],
        *dt.stride()[:2], CHUNK=CHUNK, CHUNKS=CHUNKS, HEADS=LANES,
    )  # fmt: skip
    return grad_mixed, grad_dt, sums.sum(0), before


@_backward.register_fake
def _(
    grad: Tensor, grad_final: Tensor | None, mixed: Tensor, dt: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dim, size = others[6:8]
    heads = dt.shape[2]
    return (
        mixed.new_empty(mixed.shape),
        dt.new_empty(dt.shape),
        dt.new_empty(3, heads, dtype=torch.float32),
        mixed.new_empty(len(mixed), heads, dim, size, dtype=torch.float32),
    )


def _split(mixed: Tensor, sizes: _Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, B and C as views."""
    inner, shared = sizes.inner, sizes.groups * sizes.size
    return mixed[..., :inner], mixed[..., inner : inner + shared], mixed[..., inner + shared :]


def _states(like: Tensor, sizes: _Sizes) -> Tensor:
    return like.new_empty(sizes.rows, sizes.spans, sizes.heads, sizes.dim, sizes.size)


def _parts(sizes: _Sizes) -> int:
    """Return the number of programs that scan a head's state."""
    return -(-sizes.dim * sizes.size // BLOCK)


def _steps(dt: Tensor, bias: Tensor, A_log: Tensor, sizes: _Sizes) -> tuple[Tensor, Tensor]:
    """Return each step, and its total: fp32 [rows, heads, padded length]."""
    steps = dt.new_empty(2, sizes.rows, sizes.heads, sizes.padded, dtype=torch.float32)
    _programs()[0].steps[(sizes.chunks, -(-sizes.heads // LANES), sizes.rows)](
        dt, bias.contiguous(), A_log.contiguous(), steps[0], steps[1], sizes.length, sizes.heads,
        sizes.padded, *dt.stride()[:2], CHUNK=CHUNK, HEADS=LANES,
    )  # fmt: skip
    return steps[0], steps[1]


def _carry(
    added: Tensor,
    states: Tensor,
    start: Tensor | None,
    keep: Tensor,
    axis: str,
    met: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Scan each span's contribution: fill `states` with those at each span's start (in the backward
    pass, its end) and return the states after the rows. `met`, in the backward pass: the states of
    the forward pass, and where to put their products with these."""
    rows, spans, heads, dim, size = added.shape
    numbers = dim * size

    def walk(start: Tensor | None, *, write: bool) -> Tensor:
        end = added.new_empty(rows, heads, dim, size)
        _programs()[0].carry[(-(-numbers // BLOCK), heads, rows)](
            added, states, added if start is None else start.float().contiguous(), keep, end,
            *(met or (states, added)), spans, heads, numbers, START=start is not None,
            BACKWARD=met is not None, WRITE=write, BLOCK=BLOCK, AHEAD=AHEAD,
        )  # fmt: skip
        return end

    if (parts := named(axis)).size > 1:
        kept = keep.prod(1)[..., None, None]
        others = entering(walk(start, write=False), kept, parts, backward=met is not None)
        start = others if start is None else start + others
    return walk(start, write=True)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    mixed, dt, bias, A_log, D, state, positions, *ctx.switches = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.has_state = state is not None
    ctx.save_for_backward(mixed, dt, bias, A_log, D, *output[2:], positions)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_final: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    mixed, dt, *parameters = saved[:5]
    if grad is None:
        grad = mixed.new_zeros(*mixed.shape[:2], dt.shape[2] * ctx.switches[0])
    grad_mixed, grad_dt, sums, before = _backward(grad, grad_final, *saved, *ctx.switches)
    return (
        grad_mixed,
        grad_dt,
        *(given.to(like.dtype) for given, like in zip(sums, parameters, strict=True)),
        before if ctx.has_state else None,
        *(None, None, None, None),
    )


ssd.register_autograd(_differentiate, setup_context=_keep)
