"""Log-likelihoods and hidden states of rows that context- and tensor-parallel ranks share.

    row     a c g t a c g t ·        padded to a multiple of the ranks: a causal model does not
    rank 0  a c g t a                see what follows
    rank 1            c g t · ·

Every rank gets whole rows and takes its part. Tensor-parallel ranks embed the same part, and hold
slices of its states. Sums over a row are in fp64 and equal on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...console.errors import InputError
from ...dataplane.tokenizers import TextError, Tokenizer
from ...models.model.model import Model
from ..placement.local_rows import Ids, LocalRows, sum_over_ranks
from ..scores.likelihood import POSITIONS

NORM = "norm"
"""Name of the final norm, beside the numbers of layers."""


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], names: Sequence[str]) -> list[Ids]:
    """Encode texts without the end-of-document token; `names` are those of the texts in errors."""
    try:
        encoded = tokenizer.encode(list(texts))
    except TextError as error:
        raise InputError(
            f"{names[error.number]} cannot be tokenized: {error.why}",
            hint="remove what the tokenizer has no id for",
        ) from None
    tokens = encoded.tokens.astype(np.int32)
    return [tokens[start : end - 1] for start, end in pairwise(encoded.starts.tolist())]


@torch.no_grad()
def score_batch(model: Model, rows: Sequence[Ids]) -> list[float]:
    """Return the log-likelihood of each row's tokens after its first. Collective over the ranks
    that share the rows."""
    inputs = LocalRows.cut(model, [row[:-1] for row in rows])
    targets = LocalRows.cut(model, [row[1:] for row in rows]).ids
    weights = inputs.mask([len(row) - 1 for row in rows])
    hidden, _ = model.hidden(inputs.ids)  # [rows, local_length, width]
    totals = torch.zeros(len(rows), dtype=torch.float64, device=hidden.device)
    ranks = model.axes.tensor.size
    # The loss gathers the slices of all tensor-parallel ranks, in their order.
    targets, weights = (x.unflatten(1, (ranks, -1)) for x in (targets, weights))
    chunk = max(1, POSITIONS // ranks)
    for start in range(0, hidden.shape[1], chunk):
        part = slice(start, start + chunk)
        next_ids, mask = (x[:, :, part].flatten(1).contiguous() for x in (targets, weights))
        losses = model.loss(hidden[:, part].contiguous(), next_ids, mask)[1].tokens
        totals -= losses.sum(dim=1, dtype=torch.float64)
    return sum_over_ranks(model, totals).tolist()


@torch.no_grad()
def mean_states(
    model: Model, layers: Sequence[str], rows: Sequence[Ids]
) -> list[npt.NDArray[np.float32]]:
    """Return for each row [layers, width], the means over its tokens of the states after the
    layers. Collective over the ranks that share the rows."""
    inputs = LocalRows.cut(model, rows)
    mask = inputs.mask(list(map(len, rows)))[:, inputs.states, None]
    sums: dict[str, Tensor] = {}

    def add(layer: str, states: Tensor) -> None:
        sums[layer] = (states.float() * mask).sum(dim=1, dtype=torch.float64)

    with _watched(model, layers, add):
        model.hidden(inputs.ids)
    totals = sum_over_ranks(model, torch.stack([sums[layer] for layer in layers], dim=1))
    lengths = torch.tensor(list(map(len, rows)), device=totals.device)
    return list((totals / lengths[:, None, None]).float().cpu().numpy())


@torch.no_grad()
def token_states(
    model: Model, layers: Sequence[str], rows: Sequence[Ids]
) -> tuple[int, dict[str, npt.NDArray[np.float32]]]:
    """Return the position of this rank's first state in the rows, and by layer its states [rows,
    local_length, width], padding included. Collective over the ranks that share the rows."""
    inputs = LocalRows.cut(model, rows)
    states_by_layer: dict[str, npt.NDArray[np.float32]] = {}

    def keep(layer: str, states: Tensor) -> None:
        states_by_layer[layer] = states.float().cpu().numpy()

    with _watched(model, layers, keep):
        model.hidden(inputs.ids)
    return inputs.first_state, states_by_layer


@contextlib.contextmanager
def _watched(
    model: Model, layers: Sequence[str], act: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call `act` with a layer's name and its output [rows, local_length, width], for the chosen
    layers of each forward pass."""

    def observe(layer: str, module: nn.Module, arguments: Any, output: Any) -> None:
        act(layer, output[0] if isinstance(output, tuple) else output)

    with contextlib.ExitStack() as stack:
        for layer in layers:
            module = model.norm if layer == NORM else model.blocks[layer]
            handle = module.register_forward_hook(partial(observe, layer))
            stack.callback(handle.remove)
        yield
