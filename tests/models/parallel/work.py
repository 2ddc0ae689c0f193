"""What the ranks of `Ranks` do: their part of an operator, or of a model, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.models.config import ModelConfig
from headrace.models.documents import Documents
from headrace.models.model import Model
from headrace.models.parallel import halo, states
from headrace.models.parallel.axes import Axes, Axis
from headrace.models.parallel.exchange import share

Arrays = dict[str, np.ndarray]


def context_axis() -> Axis:
    return Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def model_part(
    config: ModelConfig,
    weights: Arrays,
    tokens: np.ndarray,
    probe: np.ndarray,
    cuts: list[int] | None,
    *,
    attention: str = "a2a",
    hyena_li: str = "states",
    checkpointing: str = "none",
    training: bool = False,
    fault: str | None = None,
) -> tuple[np.ndarray, float, Arrays]:
    """Our part of the logits, the auxiliary losses, and this rank's gradients."""
    axis = context_axis()
    model = Model(config).double().train(training)
    model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    model.axes = Axes(context=axis, attention=attention, hyena_li=hyena_li)  # type: ignore[arg-type]
    model.checkpointing = checkpointing  # type: ignore[assignment]
    documents = None
    if cuts is not None:
        whole = Documents.from_cu_seqlens(torch.tensor(cuts), tokens.shape)  # type: ignore[arg-type]
        documents = whole.part(axis)
    ours = share(tokens.shape[1], axis)
    with FAULTS[fault]() if fault else mock.patch.dict({}):
        hidden, losses = model.hidden(torch.from_numpy(tokens[:, ours]), documents)
        logits = model.logits(hidden)
        # As the trainer has it: auxiliary losses in proportion to the part's share of the batch.
        total = (logits * torch.from_numpy(probe[:, ours])).sum() + losses / axis.size
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    found = {
        name: gradient.numpy()
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is not None
    }
    return logits.detach().numpy(), float(losses), found


def part_of(
    function: str,
    inputs: list[np.ndarray],
    divided: list[bool],
    probe: np.ndarray,
    *arguments: Any,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """`function(axis, *inputs, *arguments)` of our part of those inputs that are `divided`: our
    part of the output, and the gradients of all inputs."""
    axis = context_axis()
    leaves = []
    for each, cut in zip(inputs, divided, strict=True):
        mine = each[:, share(each.shape[1], axis)] if cut else each
        leaves.append(torch.from_numpy(mine.copy()).requires_grad_())
    y: Tensor = FUNCTIONS[function](axis, *leaves, *arguments)
    weight = torch.from_numpy(probe[:, share(probe.shape[1], axis)])
    gradients = torch.autograd.grad((y * weight).sum().real, leaves)
    return y.detach().numpy(), [gradient.numpy() for gradient in gradients]


@contextmanager
def shifted_halo() -> Iterator[None]:
    """Each part gets the halo of one place before its own."""
    right = halo.preceding

    def wrong(x: Tensor, count: int, axis: Axis) -> Tensor | None:
        longer = right(x, count + 1, axis)
        return longer if longer is None else longer[:, :-1]

    with mock.patch("headrace.models.operators.short_conv.preceding", wrong):
        yield


@contextmanager
def forgotten_states() -> Iterator[None]:
    """The states are exchanged, and thrown away."""
    right = states.entering

    def wrong(added: Tensor, kept: Tensor, axis: Axis) -> Tensor:
        return right(added, kept, axis) * 0

    with mock.patch("headrace.models.scan.entering", wrong):
        yield


FAULTS: dict[str, Callable[[], Any]] = {"halo": shifted_halo, "states": forgotten_states}
FUNCTIONS: dict[str, Callable[..., Tensor]] = {}
