"""Mamba-2's scan (SSD): matrix products within chunks, and a scan of the state over chunks.

    S_t = exp(dt_t·A)·S_{t−1} + dt_t·x_t⊗B_t,  y_t = S_t·C_t

The summary pass computes each chunk's contribution to the state, a scan over the chunks turns the
contributions into the states at each chunk's start, and a second pass writes the outputs; the
backward pass scans the gradients of the states from the end in the same way. Decays, sums and the
scan are fp32; in bf16 and fp16 the products are of rounded numbers, and the states at a chunk's
start are rounded to the type of the products. B and C belong to groups of heads, and their
gradients are summed over these. The twin is `ssd` in models/layers/scan.py.

Under context parallelism the op exchanges states between the ranks of a row: the states forward,
and their gradients backward, after the summary pass and before the scan over chunks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..parallel.axes import named
from ..parallel.states import entering
from .op import op

CHUNK = 64
BLOCK = 512
"""Numbers of a state that a program scans over the chunks."""
PART = 32
"""Numbers of a channel's state that a program of the backward pass processes at a time."""
AHEAD = 8
"""Chunks that it reads ahead."""
DIMS, SIZES = 128, 256
"""Widest head, and most numbers of state of a channel."""
NUMBERS = 128 * 128
"""Most numbers of state of a head: 64 × 256 take 160 KiB of shared memory in fp32."""


@cache
def _programs() -> Any:
    from .programs import ssd

    return ssd


def beyond(x: Tensor, B: Tensor) -> str | None:
    """Return why the kernel cannot take heads and states of these sizes, or None."""
    dim, size = _side(x.shape[3]), _side(B.shape[3])
    if dim > DIMS or size > SIZES or dim * size > NUMBERS:
        return (
            f"heads are {x.shape[3]} wide with {B.shape[3]} states for each channel; the limits"
            f" are {DIMS} and {SIZES}, and {NUMBERS} in all"
        )
    return None


def _side(size: int) -> int:
    """Return the side of a matrix that holds `size` numbers: a power of two, 16 or more."""
    return max(16, 1 << (size - 1).bit_length())


@op("ssd")
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    positions: Tensor | None,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, the states after the rows and, for the backward pass, the states at each chunk's
    start and the decay over each chunk. dt and A are fp32. `axis` names the context axis that
    shards the rows, or is empty."""
    x, B, C = (_joined(t) for t in (x, B, C))
    sizes, switches, grid = _laid_out(x, B, positions)
    (rows, _, heads, dim), size = x.shape, B.shape[3]
    chunks = grid[0]
    dt, A = dt.contiguous(), A.contiguous()
    where = x if positions is None else positions.contiguous()
    states = x.new_empty(rows, chunks, heads, dim, size, dtype=torch.float32)
    keep = x.new_empty(rows, chunks, heads, dtype=torch.float32)
    programs = _programs()
    programs.summaries[grid](
        x, dt, A, B, where, states, keep, *sizes, *_strides(x, B), BACKWARD=False, **switches
    )
    states, final = _carry(states, state, keep, axis, x.dtype, backward=False)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    programs.forward[grid](
        x, dt, A, B, C, where, states, out, *sizes, *_strides(x, B, C), **switches
    )
    return out, final, states, keep


@ssd.register_fake
def _(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (rows, length, heads, dim), size = x.shape, B.shape[3]
    chunks = -(-length // CHUNK)
    return (
        x.new_empty(x.shape),
        x.new_empty(rows, heads, dim, size, dtype=torch.float32),
        x.new_empty(rows, chunks, heads, dim, size),
        x.new_empty(rows, chunks, heads, dtype=torch.float32),
    )


@op("ssd_backward")
def _backward(
    grad: Tensor,
    grad_final: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    keep: Tensor,
    positions: Tensor | None,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and the state before the rows."""
    x, B, C = (_joined(t) for t in (x, B, C))
    sizes, switches, grid = _laid_out(x, B, positions)
    (rows, length, heads, _), (groups, size) = x.shape, B.shape[2:]
    dt, A, grad = dt.contiguous(), A.contiguous(), grad.contiguous()
    where = x if positions is None else positions.contiguous()
    adjoints = torch.empty_like(states, dtype=torch.float32)
    programs = _programs()
    programs.summaries[grid](
        grad, dt, A, C, where, adjoints, keep, *sizes, *_strides(grad, C), BACKWARD=True, **switches
    )
    switches["PART"] = min(PART, switches.pop("SIZE"))
    adjoints, before = _carry(adjoints, grad_final, keep, axis, x.dtype, backward=True)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_dt, grad_A = torch.empty_like(dt), torch.empty_like(keep)
    of_B, of_C = x.new_empty(2, rows, length, heads, size)
    # Four warps share the 64 rows of a product; four more would compute the same again.
    programs.backward[grid](
        grad, x, dt, A, B, C, where, states, adjoints, keep, grad_x, grad_dt, grad_A, of_B, of_C,
        *sizes, *_strides(x, B, C), **switches, num_warps=4, num_stages=1,
    )  # fmt: skip
    by_group = [
        t.unflatten(2, (groups, -1)).sum(3, dtype=torch.float32).to(B.dtype) for t in (of_B, of_C)
    ]
    return grad_x, grad_dt, grad_A.sum((0, 1)), *by_group, before


@_backward.register_fake
def _(
    grad: Tensor, grad_final: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    states = others[5]
    before = states.new_empty(states.shape[0], *states.shape[2:], dtype=torch.float32)
    x, dt, A, B, C = (t.new_empty(t.shape) for t in others[:5])
    return x, dt, A, B, C, before


def _carry(
    added: Tensor,
    start: Tensor | None,
    keep: Tensor,
    axis: str,
    dtype: torch.dtype,
    *,
    backward: bool,
) -> tuple[Tensor, Tensor]:
    """Scan each chunk's contribution. Return the states at each chunk's start, in the type of the
    products, and the states after the rows."""
    rows, chunks, heads, dim, size = added.shape
    states = torch.empty_like(added, dtype=dtype)
    numbers = dim * size

    def walk(start: Tensor | None, *, write: bool) -> Tensor:
        end = added.new_empty(rows, heads, dim, size)
        _programs().carry[(-(-numbers // BLOCK), heads, rows)](
            added, states, added if start is None else start.float().contiguous(), keep, end,
            chunks, heads, numbers, START=start is not None, BACKWARD=backward, WRITE=write,
            BLOCK=BLOCK, AHEAD=AHEAD,
        )  # fmt: skip
        return end

    if (parts := named(axis)).size > 1:
        kept = keep.prod(1)[..., None, None]
        others = entering(walk(start, write=False), kept, parts, backward=backward)
        start = others if start is None else start + others
    end = walk(start, write=True)
    return states, end


def _joined(t: Tensor) -> Tensor:
    """Return t [rows, length, heads, dim] with the heads of a token adjacent."""
    return t if t.stride(3) == 1 and t.stride(2) == t.shape[3] else t.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for t in tensors for stride in (t.stride(0), t.stride(1)))


def _laid_out(
    x: Tensor, B: Tensor, positions: Tensor | None
) -> tuple[tuple[int, ...], dict[str, Any], tuple[int, int, int]]:
    (rows, length, heads, dim), (groups, size) = x.shape, B.shape[2:]
    chunks = -(-length // CHUNK)
    switches = {
        "PACKED": positions is not None,
        "CHUNK": CHUNK,
        "DIM": _side(dim),
        "SIZE": _side(size),
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "ieee",
    }
    sizes = (length, chunks, heads, heads // groups, dim, size)
    return sizes, switches, (chunks, heads, rows)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, dt, A, B, C, state, positions, ctx.axis = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.has_state = state is not None
    ctx.save_for_backward(x, dt, A, B, C, *output[2:], positions)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_final: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    if grad is None:
        grad = torch.zeros_like(ctx.saved_tensors[0])
    *grads, before = _backward(grad, grad_final, *ctx.saved_tensors, ctx.axis)
    return *grads, before if ctx.has_state else None, None, None


ssd.register_autograd(_differentiate, setup_context=_keep)
