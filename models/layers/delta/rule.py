"""The gated delta rule: a state that unlearns what a key held before it learns a new value.

    S_t = Diag(α_t)·S_{t−1} + k_t⊗d_t,  d_t = β_t·(v_t − (Diag(α_t)·S_{t−1})ᵀ·k_t),  y_t = S_tᵀ·q_t

with decays α_t = exp(g_t), one for a state (gated DeltaNet) or one for each key channel (Kimi Delta
Attention). In a chunk that the state S enters, with G_t = Σ_{r≤t} g_r, the d_t solve a triangular
system (the WY form):

    (I + M)·D = β·(V − (e^G ⊙ K)·S),   M_ts = β_t·Σ_c k_tc·k_sc·e^{G_tc − G_sc} for s < t
    Y = (e^G ⊙ Q)·S + (the same with q for β·k, s ≤ t)·D

so D = U − W·S, and a chunk's last state is T·S + B with a transition matrix T = Diag(e^G) − K̃ᵀ·W.
A chunk in which a document begins has T = 0.

Letters of shapes: r rows, c chunks, h key heads, m value heads of a key head, t and s tokens of a
chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ...documents import Documents
from ...parallel.axes import ALONE, Axis
from ...parallel.states import receive_state
from ..recompute import recomputed

BLOCK = 16
"""Tokens of a block of scores with a decay for each channel: pairs within a block are computed one
by one, pairs of blocks as products, relative to the boundary between them. No exponent is then
above zero, however strong the decays."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Documents | None = None,
    *,
    state: Tensor | None = None,
    axis: Axis = ALONE,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Return y like v, and the final state [rows, value_heads, key_dim, value_dim].

    q and k [rows, length, heads, key_dim], v [rows, length, value_heads, value_dim], g [rows,
    length, value_heads, 1 or key_dim] at most zero, beta [rows, length, value_heads]; state, the
    initial one, like the final one. Ranks on `axis` pass states on.
    """
    if q.shape[1] == 1 and axis.size == 1:
        return recurrent_delta_rule(q, k, v, g, beta, documents, state=state)
    rows, length, heads, key_dim = k.shape
    parts = _Chunks.build(q, k, v, g, beta, documents, min(chunk, length))
    shape = rows, heads, v.shape[2] // heads, key_dim, v.shape[3]
    if axis.size > 1:
        entering = receive_state(*parts.summarize(), axis, apply=torch.matmul)
    elif state is not None:
        entering = state.to(v.dtype).view(shape)
    else:
        entering = v.new_zeros(shape)
    y, final = parts.scan(entering)
    y = y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :length]
    return y, final.flatten(1, 2)


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Documents | None = None,
    *,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` token by token, on one rank."""
    members = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(members, dim=2) for x in (q, k))
    if state is None:
        state = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3])
    state = state.to(v.dtype)
    outputs = []
    for t in range(v.shape[1]):
        if documents is not None:
            state = state * (documents.positions[:, t] > 0)[:, None, None, None]
        state = state * g[:, t].exp().unsqueeze(-1)
        predicted = torch.einsum("rhkv,rhk->rhv", state, k[:, t])
        d = beta[:, t].unsqueeze(-1) * (v[:, t] - predicted)
        state = state + k[:, t].unsqueeze(-1) * d.unsqueeze(-2)
        outputs.append(torch.einsum("rhkv,rhk->rhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state


@dataclass(frozen=True)
class _Chunks:
    """Chunks before a state enters them. e^G counts from the chunk's start, and is zero for tokens
    of a document that begins later."""

    q: Tensor
    """e^G ⊙ Q [r, c, h, m, t, key_dim]."""
    scores: Tensor
    """Σ_c q_tc·k_sc·e^{G_tc − G_sc} [r, c, h, m, t, s], zero unless s ≤ t is in t's document."""
    W: Tensor
    """[r, c, h, m, t, key_dim]."""
    U: Tensor
    """[r, c, h, m, t, value_dim]."""
    k: Tensor
    """K with decays to the chunk's end, zero for tokens of other documents than the last [r, c, h,
    m, t, key_dim]."""
    decay: Tensor
    """Decay of the entering state over the chunk [r, c, h, m, key_dim or 1, 1]."""

    @classmethod
    def build(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        documents: Documents | None,
        chunk: int,
    ) -> _Chunks:
        rows, length, heads, key_dim = k.shape
        padding = -length % chunk
        positions = (
            documents.positions
            if documents is not None
            else torch.full((rows, length), length, device=q.device)
        )
        if padding:  # β = 0 and g = 0 leave the state as it is
            q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v, g))
            beta = F.pad(beta, (0, 0, 0, padding))
            column = torch.arange(1, padding + 1, device=q.device)
            positions = torch.cat([positions, positions[:, -1:] + column], dim=1)

        # [r, c, h, 1 or m, t, …]
        q, k = (x.unflatten(1, (-1, chunk)).transpose(2, 3).unsqueeze(3) for x in (q, k))
        v, g, beta = (
            x.unflatten(1, (-1, chunk)).unflatten(3, (heads, -1)).movedim(2, 4)
            for x in (v, g, beta.unsqueeze(-1))
        )
        G = g.cumsum(dim=-2)

        column = torch.arange(chunk, device=q.device)
        start = column - positions.unflatten(1, (-1, chunk))  # of the document, within the chunk
        visible = (column <= column[:, None]) & (column >= start[..., None])  # [r, c, t, s]
        last_start = start[..., -1:]
        continues = _to_heads(start < 0)
        reaches_end = _to_heads(column >= last_start)
        unbroken = _to_heads(last_start < 0)

        from_start = G.masked_fill(~continues, float("-inf")).exp()
        to_end = (G[..., -1:, :] - G).masked_fill(~reaches_end, float("-inf")).exp()
        M = beta * decayed_scores(k, k, G, visible)  # the solver reads it below the diagonal alone
        right_sides = beta * torch.cat([from_start * k, v], dim=-1)
        solution = torch.linalg.solve_triangular(M, right_sides, upper=False, unitriangular=True)
        W, U = solution.split([key_dim, v.shape[-1]], dim=-1)
        decay = (G[..., -1:, :].exp() * unbroken).transpose(-1, -2)
        return cls(from_start * q, decayed_scores(q, k, G, visible), W, U, to_end * k, decay)

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return Y [r, c, h, m, t, value_dim] and the final state, for the state [r, h, m, key_dim,
        value_dim] that enters the first chunk."""
        states, D = [], []
        for index in range(self.W.shape[1]):
            states.append(state)
            D.append(self.U[:, index] - self.W[:, index] @ state)
            state = self.decay[:, index] * state + self.k[:, index].mT @ D[-1]
        y = self.q @ torch.stack(states, dim=1) + self.scores @ torch.stack(D, dim=1)
        return y, state

    def summarize(self) -> tuple[Tensor, Tensor]:
        """Return what all chunks add to a state, B [r, h, m, key_dim, value_dim], and their
        transition matrix T [r, h, m, key_dim, key_dim]."""
        W = self.W
        key_dim, value_dim = W.shape[-1], self.U.shape[-1]
        U = F.pad(self.U, (0, key_dim))
        identity = torch.eye(key_dim, dtype=W.dtype, device=W.device)
        summary = F.pad(identity, (value_dim, 0)).expand(*W[:, 0].shape[:-2], -1, -1)
        for index in range(W.shape[1]):
            D = U[:, index] - W[:, index] @ summary
            summary = self.decay[:, index] * summary + self.k[:, index].mT @ D
        added, transition = summary.split([value_dim, key_dim], dim=-1)
        return added, transition


def _to_heads(mask: Tensor) -> Tensor:
    """[r, c, t] → [r, c, 1, 1, t, 1]."""
    return mask[:, :, None, None, :, None]


def decayed_scores(q: Tensor, k: Tensor, G: Tensor, visible: Tensor) -> Tensor:
    """Return Σ_c q_tc·k_sc·e^{G_tc − G_sc} [r, c, h, m, t, s] where `visible` [r, c, t, s], else 0.

    q and k [r, c, h, 1, t, key_dim], G [r, c, h, m, t, key_dim or 1]."""
    hidden = ~visible[:, :, None, None]
    if G.shape[-1] == 1:
        decay = (G - G.mT).masked_fill(hidden, float("-inf")).exp()
        return (q @ k.mT) * decay
    length = G.shape[-2]
    rows_of_blocks = []
    for first in range(0, length, BLOCK):
        block = slice(first, min(first + BLOCK, length))
        q_block, k_block, G_block = q[..., block, :], k[..., block, :], G[..., block, :]
        blocks = [recomputed(_pair_scores, q_block, k_block, G_block, hidden[..., block, block])]
        if first:  # relative to the last token before the block
            boundary = G[..., first - 1 : first, :]
            earlier = k[..., :first, :] * (boundary - G[..., :first, :]).exp()
            blocks.insert(0, (q_block * (G_block - boundary).exp()) @ earlier.mT)
        later = length - block.stop
        rows_of_blocks.append(F.pad(torch.cat(blocks, dim=-1), (0, later)))
    return torch.cat(rows_of_blocks, dim=-2).masked_fill(hidden, 0)


def _pair_scores(q: Tensor, k: Tensor, G: Tensor, hidden: Tensor) -> Tensor:
    """Return the scores within a block, [t, s]; their decays are [t, s, key_dim]."""
    pairs = G.unsqueeze(-2) - G.unsqueeze(-3)
    decay = pairs.masked_fill(hidden.unsqueeze(-1), float("-inf")).exp()
    return torch.einsum("...tc,...tsc,...sc->...ts", q, decay, k)


def score_flops(chunk: int, key_dim: int, *, by_channel: bool) -> float:
    """Return the FLOPs per token of `decayed_scores` for a head, with decays for each channel or
    for a state."""
    if not by_channel:
        return 2.0 * chunk * key_dim
    ends = [*range(BLOCK, chunk, BLOCK), chunk]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    pairs: int = sum(size * end for size, end in zip(sizes, ends, strict=True))
    return 2.0 * pairs * key_dim / chunk
