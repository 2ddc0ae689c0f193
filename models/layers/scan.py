"""Linear recurrences as matrix products in chunks, with a state carried from chunk to chunk.

Documents start from a zero state. `state` is the state before the row, in generation. Under context
parallelism ranks on `axis` pass states on: each rank runs from zeros and computes what it adds to a
state and how far it decays an incoming one; the incoming state is then added to each chunk,
decayed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..documents import Documents, plain_layout
from ..parallel.axes import ALONE, Axis
from ..parallel.states import receive_state
from .recompute import recomputed


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    documents: Documents | None = None,
    *,
    state: Tensor | None = None,
    axis: Axis = ALONE,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Return y like x, and the final state, for S_t = exp(dt_t·A)·S_{t−1} + dt_t·x_t⊗B_t and
    y_t = S_t·C_t (Mamba-2).

    x [rows, length, heads, head_dim], dt [rows, length, heads], A [heads] below zero, B and C
    [rows, length, groups, N]; states [rows, heads, head_dim, N].
    """
    rows, length = x.shape[:2]
    groups = B.shape[2]
    chunk = min(chunk, length)
    padding = -length % chunk
    positions = (
        documents.positions
        if documents is not None
        else torch.full((rows, length), length, device=x.device)
    )
    if padding:  # dt = 0 leaves the state as it is
        x, B, C = (F.pad(t, (0, 0, 0, 0, 0, padding)) for t in (x, B, C))
        dt = F.pad(dt, (0, 0, 0, padding))
        column = torch.arange(1, padding + 1, device=x.device)
        positions = torch.cat([positions, positions[:, -1:] + column], dim=1)

    # [rows, chunks, chunk, groups, heads of a group, …]
    x = x.unflatten(1, (-1, chunk)).unflatten(3, (groups, -1))
    dt = dt.unflatten(1, (-1, chunk)).unflatten(3, (groups, -1))
    B, C = (t.unflatten(1, (-1, chunk)) for t in (B, C))
    A = A.unflatten(0, (groups, -1))
    column = torch.arange(chunk, device=x.device)
    start = column - positions.unflatten(1, (-1, chunk))  # of the document, within the chunk

    dA_cumsum = (dt * A).cumsum(dim=2).permute(0, 1, 3, 4, 2)  # log-decay; time last
    delta_x = x * dt.unsqueeze(-1)

    # Within a chunk: y_t = Σ_{s≤t} (C_t·B_s) · exp(total_t − total_s) · dt_s·x_s
    visible = (column <= column[:, None]) & (column >= start[..., None])  # [rows, chunks, t, s]
    decay = (dA_cumsum.unsqueeze(-1) - dA_cumsum.unsqueeze(-2)).masked_fill(
        ~visible[:, :, None, None], float("-inf")
    )
    scores = torch.einsum("bctgn,bcsgn->bcgts", C, B)
    weighted_scores = scores.unsqueeze(3) * decay.exp()
    y = torch.einsum("bcghts,bcsghp->bctghp", weighted_scores, delta_x)

    # Between chunks: the state at the end of a chunk decays through the next.
    last_start = start[..., -1:]
    reaches_end = (column >= last_start)[:, :, None, None]
    decay_to_end = (dA_cumsum[..., -1:] - dA_cumsum).masked_fill(~reaches_end, float("-inf")).exp()
    contributions = torch.einsum("bcsgn,bcghs,bcsghp->bcghpn", B, decay_to_end, delta_x)
    unbroken = last_start < 0  # the chunk begins no document
    chunk_decay = dA_cumsum[..., -1].exp() * unbroken[..., None]
    state_now = torch.zeros_like(contributions[:, 0])
    entering_states = []
    for chunk_index in range(x.shape[1]):
        entering_states.append(state_now)
        state_now = (
            state_now * chunk_decay[:, chunk_index, :, :, None, None]
            + contributions[:, chunk_index]
        )
    states = torch.stack(entering_states, dim=1)
    # Decay of the state before the row, at each chunk and after the last.
    initial_decay = F.pad(dA_cumsum[..., -1].cumsum(dim=1), (0, 0, 0, 0, 1, 0)).exp()
    initial_decay = initial_decay * F.pad(unbroken.cumprod(dim=1), (0, 0, 1, 0), value=1)[..., None]
    initial_decay = initial_decay[..., None, None]
    initial = state.to(x.dtype).unflatten(1, (groups, -1)) if state is not None else None
    if axis.size > 1:
        initial = receive_state(state_now, initial_decay[:, -1], axis)
    if initial is not None:
        states = states + initial_decay[:, :-1] * initial.unsqueeze(1)
        state_now = state_now + initial_decay[:, -1] * initial
    decay_from_start = dA_cumsum.masked_fill((start >= 0)[:, :, None, None], float("-inf")).exp()
    y = y + torch.einsum("bctgn,bcght,bcghpn->bctghp", C, decay_from_start, states)

    y = y.flatten(3, 4).flatten(1, 2)[:, :length]
    return y, state_now.flatten(1, 2)


def modal_scan(
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    documents: Documents | None = None,
    *,
    state: Tensor | None = None,
    axis: Axis = ALONE,
    final_state: bool = True,
    chunk: int = 32,
) -> tuple[Tensor, Tensor | None]:
    """Hyena-LI's modal form: the convolution with h_t = Σ_n residues_n · exp(−rates_n · t).

    A diagonal state space: S_t = exp(−rates)·S_{t−1} + x_t, y_t = residues·S_t. x
    [rows, length, width]; rates and residues [width, N]; the state is [rows, width, N]. If rates
    and residues are complex, y is the real part.
    """
    rows, length = x.shape[:2]
    chunk = min(chunk, length)
    layout = (
        documents.aligned(chunk)
        if documents is not None
        else plain_layout(rows, length, chunk, x.device)
    )
    chunked = layout.spread(x).permute(3, 0, 1, 2)  # [width, rows, chunks, time]
    time = torch.arange(chunk, device=x.device)
    powers = torch.exp(-rates.unsqueeze(-1) * time)  # λ^t: [width, N, chunk]

    # Within a chunk: a Toeplitz matrix for each channel.
    lag = time - time[:, None]  # [s, t]
    taps = real_part(torch.einsum("dn,dnt->dt", residues, powers))
    matrix = taps[:, lag.clamp(min=0)] * (lag >= 0)
    y = torch.bmm(chunked.flatten(1, 2), matrix)

    # Between chunks: N state elements for each channel.
    inputs = chunked.flatten(1, 2).to(powers.dtype)
    contributions = torch.bmm(inputs, powers.flip(-1).transpose(1, 2))
    contributions = contributions.unflatten(1, chunked.shape[1:3]).permute(
        2, 1, 0, 3
    )  # [chunks, rows, width, N]
    decay = torch.exp(-rates)
    chunk_decay = torch.exp(-rates * chunk)
    state_now = torch.zeros_like(contributions[0])
    entering_states = []
    for chunk_index in range(contributions.shape[0]):
        state_now = state_now * layout.continues[:, chunk_index, None, None]
        entering_states.append(state_now)
        state_now = state_now * chunk_decay + contributions[chunk_index]
    states = torch.stack(entering_states)  # [chunks, rows, width, N]
    last_place = layout.place[:, -1]
    unbroken = layout.continues.cumprod(dim=1)
    if axis.size > 1:
        rank_decay = torch.exp(-rates * length) * unbroken[:, -1, None, None]
        state = receive_state(_final_state(last_place, chunked, states, rates), rank_decay, axis)
    if state is not None:
        age = chunk * torch.arange(len(states), device=x.device)[:, None, None, None]
        states = states + torch.exp(-rates * age) * unbroken.T[..., None, None] * state
    state_taps = (residues * decay).unsqueeze(-1) * powers  # R·λ^{t+1}
    entering_by_channel = states.permute(2, 1, 0, 3).flatten(1, 2)  # [width, rows · chunks, N]
    y = y + real_part(torch.bmm(entering_by_channel, state_taps))
    y = layout.collect(y.unflatten(1, chunked.shape[1:3]).permute(1, 2, 3, 0))
    return y, _final_state(last_place, chunked, states, rates) if final_state else None


def modal_few(
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    positions: Tensor | None = None,
    *,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `modal_scan` for a few tokens, all with all: no shape depends on documents. positions
    [rows, length]."""
    length = x.shape[1]
    time = torch.arange(length, device=x.device)
    lag = time[:, None] - time
    powers = torch.exp(-rates.unsqueeze(-1) * time)  # [width, N, time]
    taps = real_part(torch.einsum("dn,dnt->td", residues, powers))
    if positions is None:
        positions = length + time.unsqueeze(0)
    visible = (lag >= 0) & (lag <= positions.unsqueeze(-1))  # [rows, to, from]
    matrix = taps[lag.clamp(min=0)] * visible.unsqueeze(-1)
    y = (matrix * x.unsqueeze(1)).sum(2)
    final = (x * visible[:, -1].unsqueeze(-1)).to(powers.dtype)
    final = torch.einsum("btd,dnt->bdn", final, powers.flip(-1))
    if state is not None:
        continues = (positions > time).unsqueeze(-1)
        decayed_state = state.unsqueeze(1) * torch.exp(-rates * (time + 1)[:, None, None])
        y = y + real_part((decayed_state * residues).sum(-1)) * continues
        final = final + decayed_state[:, -1] * continues[:, -1:]
    return y, final


def _final_state(last_place: Tensor, chunked: Tensor, states: Tensor, rates: Tensor) -> Tensor:
    """Return the state [rows, width, N] after each row's last token, maybe inside a chunk."""
    chunk = chunked.shape[-1]
    row = torch.arange(len(last_place), device=last_place.device)
    chunk_index, column = last_place // chunk, last_place % chunk
    inputs = chunked[:, row, chunk_index].permute(1, 0, 2)  # [rows, width, time]
    age = column[:, None] - torch.arange(chunk, device=last_place.device)
    age = age[:, None, :, None]
    powers = torch.exp(-rates[:, None] * age.clamp(min=0)) * (age >= 0)  # rows width time N
    carried = states[chunk_index, row] * torch.exp(-rates * (column + 1)[:, None, None])
    return carried + torch.einsum("bdt,bdtn->bdn", inputs.to(powers.dtype), powers)


def real_part(x: Tensor) -> Tensor:
    return x.real if x.is_complex() else x


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    documents: Documents | None = None,
    *,
    state: Tensor | None = None,
    axis: Axis = ALONE,
    chunk: int = 32,
) -> tuple[Tensor, Tensor]:
    """Mamba-1: S_t = exp(dt_t·A)·S_{t−1} + dt_t·x_t·B_t, y_t = S_t·C_t, for each channel.

    x and dt [rows, length, heads, channels], A [heads, channels, N] below zero, B and C
    [rows, length, heads, N]; the state is [rows, heads, channels, N]. Each chunk is computed by
    doubling, and recomputed in the backward pass, so that memory holds one chunk at a time.
    """
    starts = documents.positions == 0 if documents is not None else None
    if axis.size > 1:
        state = receive_state(*_selective_summary(x, dt, A, B, starts, chunk), axis)
    state_now = x.new_zeros(x.shape[0], *A.shape) if state is None else state.to(x.dtype)
    outputs = []
    for first_token in range(0, x.shape[1], chunk):
        tokens = slice(first_token, first_token + chunk)
        chunk_starts = starts[:, tokens] if starts is not None else None
        y, state_now = recomputed(
            _selective_chunk,
            x[:, tokens],
            dt[:, tokens],
            A,
            B[:, tokens],
            C[:, tokens],
            chunk_starts,
            state_now,
        )
        outputs.append(y)
    return torch.cat(outputs, dim=1), state_now


def _selective_summary(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, starts: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return this slice's contribution to a state, and an incoming state's decay, both
    [rows, heads, channels, N]. Cheaper than the scan: only the last state is computed."""
    later_delta = dt.flip(1).cumsum(1).flip(1) - dt  # Σ of the steps behind each token
    inputs, decay = dt * x, torch.exp(dt.sum(1).unsqueeze(-1) * A)
    if starts is not None:
        later_starts = starts.flip(1).cumsum(1).flip(1)  # documents that begin here or later
        inputs = inputs * (later_starts - starts.long() == 0)[:, :, None, None]
        decay = decay * (later_starts[:, 0] == 0)[:, None, None, None]
    contribution = torch.zeros_like(decay)
    for first_token in range(0, x.shape[1], chunk):
        tokens = slice(first_token, first_token + chunk)
        contribution = contribution + recomputed(
            _state_contribution, inputs[:, tokens], later_delta[:, tokens], A, B[:, tokens]
        )
    return contribution, decay


def _state_contribution(inputs: Tensor, later_delta: Tensor, A: Tensor, B: Tensor) -> Tensor:
    return torch.einsum(
        "blhp,blhn,blhpn->bhpn", inputs, B, torch.exp(later_delta.unsqueeze(-1) * A)
    )


def _selective_chunk(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    starts: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    decay = torch.exp(dt.unsqueeze(-1) * A)  # [rows, chunk, heads, channels, N]
    if starts is not None:
        decay = decay * ~starts[:, :, None, None, None]
    contributions = (dt * x).unsqueeze(-1) * B.unsqueeze(3)
    reach = 1
    while reach < x.shape[1]:  # decay and sums reach back `reach` tokens; join two such spans
        shift = (0, 0, 0, 0, 0, 0, reach, 0)
        contributions = contributions + decay * F.pad(contributions, shift)[:, :-reach]
        decay = decay * F.pad(decay, shift, value=1.0)[:, :-reach]
        reach *= 2
    states = contributions + decay * state.unsqueeze(1)
    return torch.einsum("blhpn,blhn->blhp", states, C), states[:, -1]
