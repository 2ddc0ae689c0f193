"""Linear recurrences as chunks of matrix products, with a state carried from chunk to chunk.

A document starts from a state of zeros. `state` is the state before the row, in generation. Under
context parallelism the ranks of `axis` pass states on: each part runs from zeros and computes what
it adds to a state and keeps of it; the incoming state is then added to each chunk, decayed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..documents import Documents, plain_layout
from ..parallel.axes import ALONE, Axis
from ..parallel.states import entering
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
    """Mamba-2: S_t = exp(dt_t·A)·S_{t−1} + dt_t·x_t⊗B_t, y_t = S_t·C_t.

    x [rows, length, heads, head_dim], dt [rows, length, heads], A [heads] below zero,
    B and C [rows, length, groups, N]; the state is [rows, heads, head_dim, N].
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

    total = (dt * A).cumsum(dim=2).permute(0, 1, 3, 4, 2)  # log-decay; time last
    weighted = x * dt.unsqueeze(-1)

    # Within a chunk: y_t = Σ_{s≤t} (C_t·B_s) · exp(total_t − total_s) · dt_s·x_s
    seen = (column <= column[:, None]) & (column >= start[..., None])  # [rows, chunks, t, s]
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(
        ~seen[:, :, None, None], float("-inf")
    )
    scores = torch.einsum("bctgn,bcsgn->bcgts", C, B)
    mixing = scores.unsqueeze(3) * decay.exp()
    y = torch.einsum("bcghts,bcsghp->bctghp", mixing, weighted)

    # Between chunks: the state at the end of a chunk decays through the next.
    last = start[..., -1:]
    reaches = (column >= last)[:, :, None, None]
    fade = (total[..., -1:] - total).masked_fill(~reaches, float("-inf")).exp()
    added = torch.einsum("bcsgn,bcghs,bcsghp->bcghpn", B, fade, weighted)
    unbroken = last < 0  # the chunk begins no document
    keep = total[..., -1].exp() * unbroken[..., None]
    current = torch.zeros_like(added[:, 0])
    incoming = []
    for step in range(x.shape[1]):
        incoming.append(current)
        current = current * keep[:, step, :, :, None, None] + added[:, step]
    states = torch.stack(incoming, dim=1)
    # Decay of the state before the row, at each chunk and after the last.
    faded = F.pad(total[..., -1].cumsum(dim=1), (0, 0, 0, 0, 1, 0)).exp()
    faded = faded * F.pad(unbroken.cumprod(dim=1), (0, 0, 1, 0), value=1)[..., None]
    faded = faded[..., None, None]
    before = state.to(x.dtype).unflatten(1, (groups, -1)) if state is not None else None
    if axis.size > 1:
        before = entering(current, faded[:, -1], axis)
    if before is not None:
        states = states + faded[:, :-1] * before.unsqueeze(1)
        current = current + faded[:, -1] * before
    carried = total.masked_fill((start >= 0)[:, :, None, None], float("-inf")).exp()
    y = y + torch.einsum("bctgn,bcght,bcghpn->bctghp", C, carried, states)

    y = y.flatten(3, 4).flatten(1, 2)[:, :length]
    return y, current.flatten(1, 2)


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
    spread = layout.spread(x).permute(3, 0, 1, 2)  # [width, rows, chunks, time]
    time = torch.arange(chunk, device=x.device)
    powers = torch.exp(-rates.unsqueeze(-1) * time)  # λ^t: [width, N, chunk]

    # Within a chunk: a Toeplitz matrix for each channel.
    lag = time - time[:, None]  # [s, t]
    taps = real(torch.einsum("dn,dnt->dt", residues, powers))
    matrix = taps[:, lag.clamp(min=0)] * (lag >= 0)
    y = torch.bmm(spread.flatten(1, 2), matrix)

    # Between chunks: N state elements for each channel.
    inputs = spread.flatten(1, 2).to(powers.dtype)
    added = torch.bmm(inputs, powers.flip(-1).transpose(1, 2))
    added = added.unflatten(1, spread.shape[1:3]).permute(2, 1, 0, 3)  # [chunks, rows, width, N]
    pole = torch.exp(-rates)
    whole = torch.exp(-rates * chunk)
    current = torch.zeros_like(added[0])
    incoming = []
    for step in range(added.shape[0]):
        current = current * layout.continues[:, step, None, None]
        incoming.append(current)
        current = current * whole + added[step]
    states = torch.stack(incoming)  # [chunks, rows, width, N]
    last = layout.place[:, -1]
    unbroken = layout.continues.cumprod(dim=1)
    if axis.size > 1:
        kept = torch.exp(-rates * length) * unbroken[:, -1, None, None]
        state = entering(_state_at_the_end(last, spread, states, rates), kept, axis)
    if state is not None:
        age = chunk * torch.arange(len(states), device=x.device)[:, None, None, None]
        states = states + torch.exp(-rates * age) * unbroken.T[..., None, None] * state
    carried = (residues * pole).unsqueeze(-1) * powers  # R·λ^{t+1}
    through = states.permute(2, 1, 0, 3).flatten(1, 2)  # [width, rows · chunks, N]
    y = y + real(torch.bmm(through, carried))
    y = layout.collect(y.unflatten(1, spread.shape[1:3]).permute(1, 2, 3, 0))
    return y, _state_at_the_end(last, spread, states, rates) if final_state else None


def modal_few(
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    positions: Tensor | None = None,
    *,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`modal_scan` of a few tokens, all with all: no shape depends on the documents."""
    length = x.shape[1]
    time = torch.arange(length, device=x.device)
    lag = time[:, None] - time
    powers = torch.exp(-rates.unsqueeze(-1) * time)  # [width, N, time]
    taps = real(torch.einsum("dn,dnt->td", residues, powers))
    if positions is None:
        positions = length + time.unsqueeze(0)
    seen = (lag >= 0) & (lag <= positions.unsqueeze(-1))  # [rows, to, from]
    matrix = taps[lag.clamp(min=0)] * seen.unsqueeze(-1)
    y = (matrix * x.unsqueeze(1)).sum(2)
    last = (x * seen[:, -1].unsqueeze(-1)).to(powers.dtype)
    last = torch.einsum("btd,dnt->bdn", last, powers.flip(-1))
    if state is not None:
        goes_on = (positions > time).unsqueeze(-1)
        decayed = state.unsqueeze(1) * torch.exp(-rates * (time + 1)[:, None, None])
        y = y + real((decayed * residues).sum(-1)) * goes_on
        last = last + decayed[:, -1] * goes_on[:, -1:]
    return y, last


def _state_at_the_end(last: Tensor, spread: Tensor, states: Tensor, rates: Tensor) -> Tensor:
    """State after each row's last token, which may lie inside a chunk."""
    chunk = spread.shape[-1]
    row = torch.arange(len(last), device=last.device)
    step, column = last // chunk, last % chunk
    inputs = spread[:, row, step].permute(1, 0, 2)  # [rows, width, time]
    age = column[:, None] - torch.arange(chunk, device=last.device)
    age = age[:, None, :, None]
    powers = torch.exp(-rates[:, None] * age.clamp(min=0)) * (age >= 0)  # rows width time N
    before = states[step, row] * torch.exp(-rates * (column + 1)[:, None, None])
    return before + torch.einsum("bdt,bdtn->bdn", inputs.to(powers.dtype), powers)


def real(x: Tensor) -> Tensor:
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
    begins = documents.positions == 0 if documents is not None else None
    if axis.size > 1:
        state = entering(*_selective_summary(x, dt, A, B, begins, chunk), axis)
    current = x.new_zeros(x.shape[0], *A.shape) if state is None else state.to(x.dtype)
    outputs = []
    for first in range(0, x.shape[1], chunk):
        part = slice(first, first + chunk)
        inside = begins[:, part] if begins is not None else None
        y, current = recomputed(
            _selective_chunk, x[:, part], dt[:, part], A, B[:, part], C[:, part], inside, current
        )
        outputs.append(y)
    return torch.cat(outputs, dim=1), current


def _selective_summary(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, begins: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return what this part adds to a state, and the factor that it keeps of an incoming one.

    Cheaper than the scan: only the last state is computed.
    """
    after = dt.flip(1).cumsum(1).flip(1) - dt  # Σ of the steps behind each token
    inputs, kept = dt * x, torch.exp(dt.sum(1).unsqueeze(-1) * A)
    if begins is not None:
        behind = begins.flip(1).cumsum(1).flip(1)  # documents that begin here or later
        inputs = inputs * (behind - begins.long() == 0)[:, :, None, None]
        kept = kept * (behind[:, 0] == 0)[:, None, None, None]
    added = torch.zeros_like(kept)
    for first in range(0, x.shape[1], chunk):
        part = slice(first, first + chunk)
        added = added + recomputed(_left_behind, inputs[:, part], after[:, part], A, B[:, part])
    return added, kept


def _left_behind(inputs: Tensor, after: Tensor, A: Tensor, B: Tensor) -> Tensor:
    return torch.einsum("blhp,blhn,blhpn->bhpn", inputs, B, torch.exp(after.unsqueeze(-1) * A))


def _selective_chunk(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    begins: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    decay = torch.exp(dt.unsqueeze(-1) * A)  # [rows, chunk, heads, channels, N]
    if begins is not None:
        decay = decay * ~begins[:, :, None, None, None]
    sums = (dt * x).unsqueeze(-1) * B.unsqueeze(3)
    step = 1
    while step < x.shape[1]:  # decay and sums reach back `step` tokens; join two such spans
        back = (0, 0, 0, 0, 0, 0, step, 0)
        sums = sums + decay * F.pad(sums, back)[:, :-step]
        decay = decay * F.pad(decay, back, value=1.0)[:, :-step]
        step *= 2
    states = sums + decay * state.unsqueeze(1)
    return torch.einsum("blhpn,blhn->blhp", states, C), states[:, -1]
