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
"""Tokens of a block of scores with a decay for each channel: pairs of blocks are computed as
products, relative to the boundary between them, and so are pairs of halves within a block. No
exponent is then above zero, however strong the decays."""


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
        k_scores, q_scores = decayed_scores((k, q), k, G, visible)
        M = beta * k_scores  # the solver reads it below the diagonal alone
        right_sides = beta * torch.cat([from_start * k, v], dim=-1)
        solution = torch.linalg.solve_triangular(M, right_sides, upper=False, unitriangular=True)
        W, U = solution.split([key_dim, v.shape[-1]], dim=-1)
        decay = (G[..., -1:, :].exp() * unbroken).transpose(-1, -2)
        return cls(from_start * q, q_scores, W, U, to_end * k, decay)

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


def decayed_scores(
    lefts: tuple[Tensor, Tensor], k: Tensor, G: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """Return, for both x of `lefts`, Σ_c x_tc·k_sc·e^{G_tc − G_sc} [r, c, h, m, t, s] where
    `visible` [r, c, t, s], else 0.

    `lefts` and k [r, c, h, 1, t, key_dim], G [r, c, h, m, t, key_dim or 1]."""
    hidden = ~visible[:, :, None, None]
    if G.shape[-1] == 1:
        first, second = (
            (x @ k.mT) * (G - G.mT).masked_fill(hidden, float("-inf")).exp() for x in lefts
        )
        return first, second
    x, length = torch.stack(lefts, dim=-2), G.shape[-2]
    in_blocks = recomputed(_block_scores, x, k, G)
    rows_of_blocks = []
    for number, start in enumerate(range(0, length, BLOCK)):
        end = min(start + BLOCK, length)
        blocks = [in_blocks[..., number, : end - start, :, : end - start]]
        if number:  # relative to the last token before the block
            boundary = G[..., start - 1 : start, :]
            earlier = k[..., :start, :] * (boundary - G[..., :start, :]).exp()
            decay = (G[..., start:end, :] - boundary).exp()
            blocks.insert(0, _multiply(x[..., start:end, :, :], decay, earlier))
        rows_of_blocks.append(F.pad(torch.cat(blocks, dim=-1), (0, length - end)))
    scores = torch.cat(rows_of_blocks, dim=-3).masked_fill(hidden.unsqueeze(-2), 0)
    first, second = scores.unbind(dim=-2)
    return first, second


def _block_scores(x: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """Return the scores within blocks [r, c, h, m, block, t, 2, s], without those of later keys,
    for x [r, c, h, 1, t, 2, key_dim].

    Half of a block's keys are before the half of its queries: their scores are products, relative
    to the last key. So are those of the halves of a half, down to single tokens."""
    padding = -G.shape[-2] % BLOCK
    if padding:
        x, k = F.pad(x, (0, 0, 0, 0, 0, padding)), F.pad(k, (0, 0, 0, padding))
        G = torch.cat([G, G[..., -1:, :].expand(*G.shape[:-2], padding, -1)], dim=-2)
    scores = (x * k.unsqueeze(-2)).sum(dim=-1)  # of a token with itself
    scores = scores[..., None, :, None].expand(*G.shape[:-1], 1, 2, 1)
    size = 1
    while size < BLOCK:
        x_late = x.unflatten(-3, (-1, 2, size))[..., 1, :, :, :]
        k_early = k.unflatten(-2, (-1, 2, size))[..., 0, :, :]
        G_early, G_late = G.unflatten(-2, (-1, 2, size)).unbind(dim=-3)
        boundary = G_early[..., -1:, :]
        k_decayed = k_early * (boundary - G_early).exp()
        products = _multiply(x_late, (G_late - boundary).exp(), k_decayed)
        early, late = scores.unflatten(-4, (-1, 2)).unbind(dim=-4)
        rows = F.pad(early, (0, size)), torch.cat([products, late], dim=-1)
        scores, size = torch.cat(rows, dim=-3), 2 * size
    return scores


def _multiply(x: Tensor, decay: Tensor, k: Tensor) -> Tensor:
    """Return (decay ⊙ x)·kᵀ [..., t, 2, s] for x [..., t, 2, key_dim], decay [..., t, key_dim] and
    k [..., s, key_dim]."""
    products: Tensor = (x * decay.unsqueeze(-2)).flatten(-3, -2) @ k.mT
    pairs: Tensor = products.unflatten(-2, (-1, 2))
    return pairs


def score_flops(chunk: int, key_dim: int, *, by_channel: bool) -> float:
    """Return the FLOPs per token of `decayed_scores` for a head, with decays for each channel or
    for a state; all pairs within a block count, as a fused kernel computes them."""
    if not by_channel:
        return 2.0 * chunk * key_dim
    ends = [*range(BLOCK, chunk, BLOCK), chunk]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    pairs: int = sum(size * end for size, end in zip(sizes, ends, strict=True))
    return 2.0 * pairs * key_dim / chunk
