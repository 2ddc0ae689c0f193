"""The gated delta rule: triangular systems and matrix products within chunks, a state between them.

    S_t = Diag(e^{g_t})·S_{t−1} + k_t⊗d_t,  d_t = β_t·(v_t − (Diag(e^{g_t})·S_{t−1})ᵀ·k_t)
    y_t = S_tᵀ·q_t

Scores and the inverse of a chunk's triangular system (models/layers/delta/rule.py has the
equations) are computed for all chunks at once. Then a program walks along a head's chunks with some
columns of its state in registers and stores the state before each chunk, and all chunks' outputs
are computed at once. The backward pass reads what the forward pass stored, walks from the end with
the gradient of the state, and computes all other gradients chunk by chunk. Inverses are merged from
16 rows up in fp32. Decays, sums and the state in a program are fp32; in bf16 and fp16 the products
take rounded numbers, and stored states are rounded. The twin is `delta_rule` in
models/layers/delta/rule.py.

Under context parallelism the op walks a part twice: from zeros and, for the transition matrix, from
the identity; then from the state that earlier ranks' parts give, in the forward pass, and later
ranks' gradients, in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..parallel.axes import Axis
from ..parallel.groups import find_axis
from ..parallel.states import receive_state
from .launch import Programs
from .layout import to_channels_last
from .op import op

CHUNK = 64
BLOCK = 16
"""Rows of a triangular system that are inverted directly; tokens whose pairs have decays of their
own."""
VALUES = 64
"""Value channels of a program."""
CHANNELS = 64
"""Key channels of a program, in the backward pass."""
WARPS = 8
"""Warps of a program with a state or several accumulators."""
MAX_KEY_DIM, MAX_VALUE_DIM = 128, 256
"""Kernel limits: key and value channels of a head."""


@cache
def _programs() -> tuple[Any, Any]:
    from .programs import delta, delta_backward

    return Programs(delta), Programs(delta_backward)


def unsupported_reason(key_dim: int, value_dim: int) -> str | None:
    """Return why the kernel does not support these sizes, or None."""
    if key_dim > MAX_KEY_DIM or value_dim > MAX_VALUE_DIM:
        return (
            f"heads have {key_dim} key and {value_dim} value channels; the limits are "
            f"{MAX_KEY_DIM} and {MAX_VALUE_DIM}"
        )
    return None


def _tile_side(size: int) -> int:
    """Round a matrix side up to a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class _Call:
    """A call's tensors without copies where possible, its sizes, and what programs take of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    positions: Tensor | None
    heads: int
    key_dim: int
    value_dim: int
    decays: int

    @classmethod
    def build(
        cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, positions: Tensor | None
    ) -> _Call:
        if positions is not None:
            positions = positions.contiguous()
        q_flat, k_flat, v_flat = (to_channels_last(x.flatten(2)) for x in (q, k, v))
        sizes = v.shape[2], q.shape[3], v.shape[3], g.shape[3]
        return cls(q_flat, k_flat, v_flat, beta.float().contiguous(), positions, *sizes)

    @property
    def rows(self) -> int:
        return len(self.q)

    @property
    def length(self) -> int:
        return self.q.shape[1]

    @property
    def chunks(self) -> int:
        return -(-self.length // CHUNK)

    @property
    def padded(self) -> int:
        return self.chunks * CHUNK

    @property
    def position_ids(self) -> Tensor:
        """Positions, or a placeholder."""
        return self.beta if self.positions is None else self.positions

    @property
    def key_sizes(self) -> tuple[int, ...]:
        """Arguments of programs, in order: heads, heads for each key, key channels."""
        heads_per_key = self.heads * self.key_dim // self.k.shape[2]
        return self.heads, heads_per_key, self.key_dim

    @property
    def by_channel(self) -> bool:
        return self.decays > 1

    @property
    def constants(self) -> dict[str, Any]:
        precision = "tf32x3" if self.q.dtype == torch.float32 else "ieee"
        return {
            "PACKED": self.positions is not None,
            "CHUNK": CHUNK,
            "PRECISION": precision,
            "num_stages": 1,
        }

    @property
    def state_constants(self) -> dict[str, Any]:
        return {
            **self.constants,
            "BY_CHANNEL": self.by_channel,
            "KEY_DIM": _tile_side(self.key_dim),
            "VALUES": self.values(self.value_dim),
            "num_warps": WARPS,
        }

    def values(self, dim: int) -> int:
        """Return the value channels of a program."""
        return min(VALUES, _tile_side(dim))

    def empty(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new tensor [rows, heads, padded, width]."""
        return self.q.new_empty(self.rows, self.heads, self.padded, width, dtype=dtype)

    def empty_states(self) -> Tensor:
        shape = self.rows, self.heads, self.chunks, self.key_dim, self.value_dim
        return self.q.new_empty(shape)

    def empty_state(self, dim: int) -> Tensor:
        return self.q.new_empty(self.rows, self.heads, self.key_dim, dim, dtype=torch.float32)


@op("delta")
def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    positions: Tensor | None,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y like v, and the final state [rows, value_heads, key_dim, value_dim]; for the
    backward pass G, inverses, W, states before each chunk, P, D and the transition matrix, empty on
    one rank.

    q and k [rows, length, heads, key_dim], v [rows, length, value_heads, value_dim], g [rows,
    length, value_heads, 1 or key_dim] at most zero, beta [rows, length, value_heads]; state, the
    initial one, like the final one; positions [rows, length] for packed rows. `axis` names the
    context axis that shards the rows, or is empty.
    """
    call, programs = _Call.build(q, k, v, g, beta, positions), _programs()[0]
    G = _cumsum(g.float().contiguous(), call)
    M, P = call.empty(CHUNK, torch.float32), call.empty(CHUNK)
    sizes = (call.length, call.padded, *call.key_sizes)
    strides = (*call.q.stride()[:2], *call.k.stride()[:2])
    key_dim = _tile_side(call.key_dim)
    pairs = call.q, call.k, call.beta, G, call.position_ids, M, P, *sizes, *strides
    if call.by_channel:
        grid = (call.padded // BLOCK, call.heads, call.rows)
        programs.delta_channel_scores[grid](*pairs, BLOCK=BLOCK, KEY_DIM=key_dim, **call.constants)
    else:
        grid = (call.chunks, call.heads, call.rows)
        programs.delta_scores[grid](*pairs, KEY_DIM=key_dim, **call.constants)
    inverses, W, U = call.empty(CHUNK), call.empty(call.key_dim), call.empty(call.value_dim)
    programs.delta_invert[(call.rows * call.heads * call.chunks,)](
        M, inverses, CHUNK=CHUNK, BLOCK=BLOCK, PRECISION="tf32x3"
    )
    programs.delta_solve[(call.chunks, call.heads, call.rows)](
        call.k, call.v, call.beta, G, call.position_ids, inverses, W, U, *sizes, call.value_dim,
        *call.k.stride()[:2], *call.v.stride()[:2], **call.state_constants,
    )  # fmt: skip
    states, D = call.empty_states(), torch.empty_like(U)

    def walk(initial: Tensor | None, *, write: bool) -> Tensor:
        return _walk(call, W, U, G, initial, states, D, call.value_dim, write=write)

    transition = G.new_empty(0)
    if (context := find_axis(axis)).size > 1:
        transition = _walk(call, W, U, G, None, states, D, call.key_dim, add=False)
        state = _receive(walk(state, write=False), transition, state, context)
    final = walk(state, write=True)
    y = v.new_empty(v.shape)
    programs.delta_outputs[(call.chunks, -(-call.value_dim // VALUES) * call.heads, call.rows)](
        call.q, G, call.position_ids, states, P, D, y, call.length, call.padded, call.chunks,
        *call.key_sizes, call.value_dim, *call.q.stride()[:2], **call.state_constants,
    )  # fmt: skip
    return y, final, G, inverses, W, states, P, D, transition


def _cumsum(g: Tensor, call: _Call, *, reverse: bool = False) -> Tensor:
    """Return G [rows, heads, padded, decays] from g [rows, length, heads, decays]; if `reverse`, dg
    from dG."""
    shape = (call.rows, call.length, call.heads, call.decays)
    out = g.new_empty(shape) if reverse else call.empty(call.decays, torch.float32)
    _programs()[0].delta_cumsum[(call.chunks, call.heads, call.rows)](
        g, out, call.length, call.padded, call.heads, call.decays, REVERSE=reverse, CHUNK=CHUNK,
        WIDTH=1 << (call.decays - 1).bit_length(),
    )  # fmt: skip
    return out


def _walk(
    call: _Call,
    W: Tensor,
    U: Tensor,
    G: Tensor,
    initial: Tensor | None,
    states: Tensor,
    D: Tensor,
    state_dim: int,
    *,
    add: bool = True,
    write: bool = False,
) -> Tensor:
    """Walk along the chunks from a state, or without `add` from the identity; return the last."""
    final, values = call.empty_state(state_dim), call.values(state_dim)
    start = final if initial is None else initial.float().contiguous()
    _programs()[0].delta_states[(-(-state_dim // values), call.heads, call.rows)](
        call.k, W, U, G, call.position_ids, start, states, D, final, call.length, call.padded,
        call.chunks, *call.key_sizes, state_dim, *call.k.stride()[:2], START=initial is not None,
        ADD=add, WRITE=write, **{**call.state_constants, "VALUES": values},
    )  # fmt: skip
    return final


def _receive(
    added: Tensor, transition: Tensor, state: Tensor | None, axis: Axis, *, backward: bool = False
) -> Tensor:
    """Return the state that enters this rank's part: of other ranks, and its own."""
    received = receive_state(added, transition, axis, backward=backward, apply=torch.matmul)
    return received if state is None else state + received


@delta.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None,
    positions: Tensor | None, axis: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _Call.build(q, k, v, g, beta, positions)
    states = call.empty_states()
    transition = call.empty_state(call.key_dim) if axis else g.new_empty(0, dtype=torch.float32)
    return (
        v.new_empty(v.shape),
        call.empty_state(call.value_dim),
        call.empty(call.decays, torch.float32),
        call.empty(CHUNK),
        call.empty(call.key_dim),
        states,
        call.empty(CHUNK),
        call.empty(call.value_dim),
        transition,
    )


@op("delta_backward")
def _backward(
    dy: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    G: Tensor,
    inverses: Tensor,
    W: Tensor,
    states: Tensor,
    P: Tensor,
    D: Tensor,
    transition: Tensor,
    positions: Tensor | None,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients for q, k, v, g, beta and the initial state. dy is y's gradient; G to
    transition come from the forward pass."""
    call = _Call.build(q, k, v, g, beta, positions)
    programs, dy = _programs()[1], dy.contiguous()
    sizes = (call.length, call.padded, call.chunks, *call.key_sizes, call.value_dim)
    strides = (*call.q.stride()[:2], *call.k.stride()[:2])
    state_grads, dD = call.empty_states(), torch.empty_like(D)

    def walk(initial: Tensor | None, *, write: bool) -> Tensor:
        final = call.empty_state(call.value_dim)
        programs.delta_backward_states[(-(-call.value_dim // VALUES), call.heads, call.rows)](
            call.q, call.k, W, P, G, call.position_ids, dy,
            final if initial is None else initial.float().contiguous(), state_grads, dD, final,
            *sizes, *strides, START=initial is not None, WRITE=write, **call.state_constants,
        )  # fmt: skip
        return final

    if (context := find_axis(axis)).size > 1:
        added = walk(grad_final_state, write=False)
        grad_final_state = _receive(
            added, transition.mT.contiguous(), grad_final_state, context, backward=True
        )
    grad_state = walk(grad_final_state, write=True)

    dR, dv = torch.empty_like(D), v.new_empty(v.shape)
    dM, dP = G.new_empty(2, *G.shape[:3], CHUNK)
    channels = min(CHANNELS, _tile_side(call.key_dim))
    blocks = -(-call.key_dim // channels)
    sums = G.new_empty(2, 1 + blocks, *G.shape[:3])  # of β's gradient and, by head, of G's
    precision, values = call.constants["PRECISION"], call.values(call.value_dim)
    programs.delta_backward_values[(call.chunks, call.heads, call.rows)](
        call.v, call.beta, inverses, D, dD, dy, dR, dv, dM, dP, sums[0, 0], call.length,
        call.padded, call.heads, call.value_dim, *call.v.stride()[:2], CHUNK=CHUNK, VALUES=values,
        PRECISION=precision, num_warps=WARPS,
    )  # fmt: skip
    pair_grads = [G] * 3  # placeholders
    if call.by_channel:
        pair_grads = list(G.new_empty(3, *G.shape))
        programs.delta_backward_pairs[(call.padded // BLOCK, blocks * call.heads, call.rows)](
            call.q, call.k, G, call.position_ids, dM, dP, *pair_grads, call.beta, call.length,
            call.padded, *call.key_sizes, *strides, BLOCK=BLOCK, CHANNELS=channels,
            **call.constants,
        )  # fmt: skip
    key_shape = (call.rows, call.length, call.heads, call.key_dim)
    shared = call.heads > q.shape[2]
    dq, dk = torch.empty(2, *key_shape, dtype=torch.float32 if shared else q.dtype, device=q.device)
    dG = torch.empty_like(G) if call.by_channel else sums[1, 1:]
    programs.delta_backward_keys[(call.chunks, blocks * call.heads, call.rows)](
        call.q, call.k, call.beta, G, call.position_ids, states, state_grads, D, dR, dM, dP, dy,
        *pair_grads, dq, dk, dG, sums[0, 1:], *sizes, *strides, BY_CHANNEL=call.by_channel,
        CHANNELS=channels, VALUES=min(values, VALUES // 2), num_warps=WARPS, **call.constants,
    )  # fmt: skip
    if not call.by_channel:
        dG = dG.sum(0).unsqueeze(-1)
    dg = _cumsum(dG, call, reverse=True)
    dbeta = sums[0].sum(0)[..., : call.length].transpose(1, 2)
    if shared:
        dq, dk = (x.unflatten(2, (q.shape[2], -1)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg.to(g.dtype), dbeta.to(beta.dtype, copy=True), grad_state


@_backward.register_fake
def _(
    dy: Tensor, grad_final_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    state = q.new_empty(len(q), *v.shape[2:3], q.shape[3], v.shape[3], dtype=torch.float32)
    return (*(x.new_empty(x.shape) for x in (q, k, v, g, beta)), state)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, g, beta, state, positions, ctx.axis = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.has_state = state is not None
    ctx.save_for_backward(q, k, v, g, beta, *output[2:], positions)


def _autograd_backward(
    ctx: Any, dy: Tensor | None, grad_final_state: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    if dy is None:
        dy = torch.zeros_like(saved[2])
    *grads, grad_state = _backward(dy, grad_final_state, *saved, ctx.axis)
    return (*grads, grad_state if ctx.has_state else None, None, None)


delta.register_autograd(_autograd_backward, setup_context=_setup_context)
