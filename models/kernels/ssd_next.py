"""Mamba-2's scan by its next programs, for `kernels.ssd: next`; ssd.py has the equations.

A chunk has twice the tokens of ssd.py's, and its scores belong to all heads of a group: a program
holds them in registers and goes over its heads, whose tiles it loads ahead. A walk along the row
stores the state at each chunk's start; the backward pass computes these states again, so that the
forward pass keeps nothing but its inputs. No program writes scores to memory forward; backward, the
gradients of scores are sums over heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..parallel.groups import find_axis
from ..parallel.states import receive_state
from . import choice
from .launch import Programs
from .layout import to_channels_last
from .ssd_limits import tile_side

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of x, B and C; in fp32 the tiles do not fit into registers, and the confirmed programs
run."""
CHUNK = 128
"""Tokens of a chunk."""
MULTIPROCESSORS = 132
"""Of a GPU that programs are divided for: each holds one program that goes over its heads."""
SCORE_HEADS = 2
"""Heads that take as long as a program's scores."""
DELTA_HEADS = 16
"""Heads per program, in ssd_decays and ssd_backward_decays."""
SUM_TOKENS = 64
"""Tokens of a program that sums the gradients of B and C over the heads of a group."""
STATE_BLOCK = 64
"""State numbers of a channel in a program that walks along a row."""
OPTIONS = {"num_warps": 8, "num_stages": 2}
"""With two stages, a loop's next tiles are loaded while the present ones are multiplied."""


def runs(xBC: Tensor) -> bool:
    """Return True if the next programs run for these numbers in this process."""
    return "ssd" in choice.NEXT and xBC.dtype in DTYPES


@cache
def _programs() -> Any:
    from .programs import ssd_backward, ssd_next, ssd_next_backward

    return Programs(ssd_next), Programs(ssd_next_backward), Programs(ssd_backward)


@dataclass(frozen=True)
class _ChunkCall:
    """A call's tensors without copies where possible, its sizes and decays."""

    xBC: Tensor
    dt: Tensor
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    positions: Tensor | None
    head_dim: int
    state_size: int

    @property
    def rows(self) -> int:
        return len(self.xBC)

    @property
    def length(self) -> int:
        return self.xBC.shape[1]

    @property
    def heads(self) -> int:
        return self.dt.shape[2]

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def groups(self) -> int:
        return (self.xBC.shape[2] - self.inner) // (2 * self.state_size)

    @property
    def chunks(self) -> int:
        return -(-self.length // CHUNK)

    @property
    def padded_length(self) -> int:
        return self.chunks * CHUNK

    @property
    def heads_per_program(self) -> int:
        """Heads of a group for which the programs end first; the more, the fewer partial sums."""
        return min(_divisors(self.heads // self.groups), key=self._count_turns)

    def _count_turns(self, heads_per_program: int) -> tuple[int, int]:
        programs = self.rows * self.chunks * self.heads // heads_per_program
        waves = -(-programs // MULTIPROCESSORS)
        return waves * (heads_per_program + SCORE_HEADS), -heads_per_program

    @property
    def state_blocks(self) -> int:
        """Programs that walk along one row with parts of one head's state."""
        return -(-self.state_size // self.state_block)

    @property
    def state_block(self) -> int:
        return min(STATE_BLOCK, tile_side(self.state_size))

    @property
    def position_ids(self) -> Tensor:
        """Positions, or a placeholder."""
        return self.A_log if self.positions is None else self.positions

    @property
    def sizes(self) -> tuple[int, ...]:
        """Arguments of programs, in order."""
        return (
            self.heads,
            self.heads // self.groups,
            self.head_dim,
            self.state_size,
        )

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Arguments of programs that go over their heads."""
        return self.heads_per_program, *self.sizes

    @property
    def walk_constants(self) -> dict[str, Any]:
        return {
            "CHUNK": CHUNK,
            "HEAD_DIM": tile_side(self.head_dim),
            **OPTIONS,
        }

    @property
    def constants(self) -> dict[str, Any]:
        return {
            **self.walk_constants,
            "STATE_SIZE": tile_side(self.state_size),
        }

    @property
    def head_grid(self) -> tuple[int, int, int]:
        """Programs that go over their heads."""
        return self.chunks, self.heads // self.heads_per_program, self.rows

    @property
    def delta_grid(self) -> tuple[int, int, int]:
        return self.chunks, -(-self.heads // DELTA_HEADS), self.rows

    def split(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, B and C as views of xBC."""
        end_B = self.inner + self.groups * self.state_size
        return xBC[..., : self.inner], xBC[..., self.inner : end_B], xBC[..., end_B:]

    def empty_states(self) -> Tensor:
        shape = self.rows, self.chunks, self.heads, self.head_dim, self.state_size
        return self.xBC.new_empty(shape)

    def empty_state(self) -> Tensor:
        shape = self.rows, self.heads, self.head_dim, self.state_size
        return self.xBC.new_empty(shape, dtype=torch.float32)

    def empty_sums(self, count: int) -> Tensor:
        """Return new tensors [count, rows, heads, padded_length]."""
        shape = count, self.rows, self.heads, self.padded_length
        return self.xBC.new_empty(shape, dtype=torch.float32)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _build(
    xBC: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    positions: Tensor | None,
    head_dim: int,
    state_size: int,
) -> _ChunkCall:
    return _ChunkCall(
        to_channels_last(xBC), to_channels_last(dt), dt_bias.contiguous(), A_log.contiguous(),
        D.contiguous(), None if positions is None else positions.contiguous(), head_dim, state_size,
    )  # fmt: skip


@dataclass(frozen=True)
class _Decays:
    """What depends on dt alone; the docstring of programs/ssd_next.py has the equations."""

    delta: Tensor
    log_decay: Tensor
    log_source: Tensor
    target_weight: Tensor
    source_weight: Tensor
    by_chunk: Tensor


def _compute_decays(call: _ChunkCall) -> _Decays:
    by_token = call.empty_sums(5)
    by_chunk = by_token.new_empty(call.rows, call.chunks, call.heads)
    _programs()[0].ssd_decays[call.delta_grid](
        call.dt, call.dt_bias, call.A_log, call.position_ids, *by_token, by_chunk, call.length,
        call.heads, call.padded_length, *call.dt.stride()[:2], PACKED=call.positions is not None,
        CHUNK=CHUNK, HEADS=DELTA_HEADS,
    )  # fmt: skip
    delta, log_decay, log_source, target_weight, source_weight = by_token
    return _Decays(delta, log_decay, log_source, target_weight, source_weight, by_chunk)


def _walk(
    call: _ChunkCall,
    x: Tensor,
    B: Tensor,
    weights: Tensor,
    decays: _Decays,
    initial: Tensor | None,
    states: Tensor | None,
    backward_states: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Fill `states`, unless they are None, and return the final state. The backward pass takes
    the forward states and the tensor of spanning pairs."""
    final = call.empty_state()
    start = final if initial is None else initial.float().contiguous()
    _programs()[0].ssd_walk_states[(call.state_blocks, call.heads, call.rows)](
        x, B, weights, decays.by_chunk, start, final if states is None else states, final,
        *(backward_states or (final, final)), call.length, call.padded_length, call.chunks,
        *call.sizes, *x.stride()[:2], *B.stride()[:2], START=initial is not None,
        WRITE=states is not None, BACKWARD=backward_states is not None,
        STATE_BLOCK=call.state_block, **call.walk_constants,
    )  # fmt: skip
    return final


def forward(
    xBC: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    state: Tensor | None,
    positions: Tensor | None,
    head_dim: int,
    state_size: int,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y and the final state, like `ssd`; for the backward pass the state that enters the
    row, empty without one, and an empty tensor."""
    call = _build(xBC, dt, dt_bias, A_log, D, positions, head_dim, state_size)
    x, B, C = call.split(call.xBC)
    decays, states = _compute_decays(call), call.empty_states()

    def walk(initial: Tensor | None, states: Tensor | None) -> Tensor:
        return _walk(call, x, B, decays.source_weight, decays, initial, states)

    entering = state
    if (context := find_axis(axis)).size > 1:
        rank_decay = decays.by_chunk.prod(1)[..., None, None]
        received = receive_state(walk(state, None), rank_decay, context, backward=False)
        entering = received if state is None else state + received
    final = walk(entering, states)
    out = xBC.new_empty(call.rows, call.length, call.inner)
    _programs()[0].ssd_chunk_outputs[call.head_grid](
        x, C, B, decays.log_decay, decays.log_source, decays.target_weight, call.D,
        call.position_ids, states, out, call.length, call.padded_length, call.chunks,
        *call.block_sizes, *x.stride()[:2], *B.stride()[:2], *out.stride()[:2],
        PACKED=positions is not None, BACKWARD=False, **call.constants,
    )  # fmt: skip
    empty = decays.by_chunk.new_empty(0)
    return out, final, _entering_state(entering, axis, call), empty


def _entering_state(state: Tensor | None, axis: str, call: _ChunkCall) -> Tensor:
    """Return a state to keep: under context parallelism zeros if there is none."""
    if state is not None:
        return state.float().clone()
    return call.empty_state().zero_() if axis else call.xBC.new_empty(0, dtype=torch.float32)


def forward_shapes(
    xBC: Tensor, dt: Tensor, state: Tensor | None, head_dim: int, state_size: int, axis: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `forward` does, empty."""
    shape = len(xBC), dt.shape[2], head_dim, state_size
    return (
        xBC.new_empty(*xBC.shape[:2], dt.shape[2] * head_dim),
        xBC.new_empty(shape, dtype=torch.float32),
        xBC.new_empty(shape if axis or state is not None else 0, dtype=torch.float32),
        xBC.new_empty(0, dtype=torch.float32),
    )


def backward(
    dy: Tensor,
    grad_final_state: Tensor | None,
    xBC: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    entering: Tensor,
    positions: Tensor | None,
    head_dim: int,
    state_size: int,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients for xBC, dt, (dt_bias, A_log, D) [3, heads] and the initial state."""
    call = _build(xBC, dt, dt_bias, A_log, D, positions, head_dim, state_size)
    dy = to_channels_last(dy)
    x, B, C = call.split(call.xBC)
    grad_xBC = torch.empty(xBC.shape, dtype=xBC.dtype, device=xBC.device)
    grad_x, grad_BC = grad_xBC.tensor_split((call.inner,), dim=2)
    decays, states = _compute_decays(call), call.empty_states()
    _walk(call, x, B, decays.source_weight, decays, entering if len(entering) else None, states)
    grad_states = torch.empty_like(states)
    spanning_pairs = decays.delta.new_empty(*decays.by_chunk.shape, call.state_blocks)

    def walk(initial: Tensor | None, grad_states: Tensor | None) -> Tensor:
        return _walk(
            call, dy, C, decays.target_weight, decays, initial, grad_states,
            (states, spanning_pairs),
        )  # fmt: skip

    if (context := find_axis(axis)).size > 1:
        rank_decay = decays.by_chunk.prod(1)[..., None, None]
        received = receive_state(walk(grad_final_state, None), rank_decay, context, backward=True)
        grad_final_state = received if grad_final_state is None else grad_final_state + received
    grad_state = walk(grad_final_state, grad_states)

    forward_programs, programs, confirmed_programs = _programs()
    xBC_strides, dy_strides, packed = x.stride()[:2], dy.stride()[:2], positions is not None
    forward_programs.ssd_chunk_outputs[call.head_grid](
        dy, B, C, decays.log_source, decays.log_decay, decays.source_weight, call.D,
        call.position_ids, grad_states, grad_x, call.length, call.padded_length, call.chunks,
        *call.block_sizes, *dy_strides, *xBC_strides, *grad_xBC.stride()[:2], PACKED=packed,
        BACKWARD=True, **call.constants,
    )  # fmt: skip
    num_blocks = call.head_grid[1]
    sums_t, sums_s = call.empty_sums(4).unflatten(0, (2, 2))
    state_sums_t, state_sums_s = call.empty_sums(2)
    D_sums = decays.by_chunk.new_empty(call.rows, call.chunks, 2, call.heads)
    score_grads = xBC.new_empty(call.rows, call.chunks, num_blocks, CHUNK, CHUNK)
    programs.ssd_backward_scores[(3 * call.chunks, num_blocks, call.rows)](
        dy, x, B, C, decays.log_decay, decays.log_source, call.position_ids, sums_t, sums_s, D_sums,
        score_grads, call.length, call.padded_length, *call.block_sizes, *dy_strides, *xBC_strides,
        PACKED=packed, BLOCK=CHUNK // 2, **{**call.constants, "num_warps": 4},
    )  # fmt: skip
    partial_shape = 2, num_blocks, call.rows, call.length, state_size
    partial_grads = decays.delta.new_empty(partial_shape)  # of B, and of C
    for BACKWARD, values, target, source, boundary_states, weights, state_sums, strides, part in (
        (False, dy, C, B, states, decays.target_weight, state_sums_t, dy_strides, 1),
        (True, x, B, C, grad_states, decays.source_weight, state_sums_s, xBC_strides, 0),
    ):
        programs.ssd_backward_states[call.head_grid](
            values, target, source, weights, call.position_ids, boundary_states, score_grads,
            state_sums, partial_grads[part], call.length, call.padded_length, *call.block_sizes,
            *strides, *xBC_strides, PACKED=packed, BACKWARD=BACKWARD, **call.constants,
        )  # fmt: skip
    confirmed_programs.ssd_backward_sum_BC[
        (-(-call.length // SUM_TOKENS), 2 * call.groups, call.rows)
    ](
        partial_grads, grad_BC, call.length, num_blocks // call.groups, state_size,
        *grad_xBC.stride()[:2], CHUNK=SUM_TOKENS, STATE_SIZE=tile_side(state_size),
    )  # fmt: skip
    grad_dt = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
    param_grads = decays.delta.new_empty(call.rows * call.chunks, 3, call.heads)
    programs.ssd_backward_decays[call.delta_grid](
        call.dt, call.dt_bias, call.A_log, decays.delta, sums_t, sums_s, state_sums_t, state_sums_s,
        D_sums, spanning_pairs, grad_dt, param_grads, call.length, call.heads, call.padded_length,
        call.state_blocks, *call.dt.stride()[:2], CHUNK=CHUNK, HEADS=DELTA_HEADS,
    )  # fmt: skip
    return grad_xBC, grad_dt, param_grads.sum(0), grad_state
