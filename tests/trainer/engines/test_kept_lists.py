"""Lists that an engine keeps between steps: the same bits, and no memory of gradients."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from headrace.models.parallel.local_shard import LocalShard
from headrace.trainer.engines.optimizers.adamw_step import AdamW
from headrace.trainer.engines.optimizers.base import ParameterGroup
from headrace.trainer.engines.pieces import FragmentBuilder, ParameterPiece

GROUPS = ((3, 5), (4,))


def optimizer() -> AdamW:
    generator = torch.Generator().manual_seed(0)
    groups = [
        {
            "params": [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes],
            "weight_decay": 0.1 * number,
            "lr_factor": 1.0 + number,
        }
        for number, sizes in enumerate(GROUPS)
    ]
    return AdamW(groups, lr=0.1, fused=True)


def train(adamw: AdamW, *, without: int | None = None) -> list[torch.Tensor]:
    """Train for some steps; one of them is refused, in one a parameter has no gradient (`without`),
    and then states are loaded. Return weights and states."""
    parameters = [p for group in adamw.param_groups for p in group["params"]]
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if (step, number) == (3, without) else gradient
        adamw.set_lr(0.1 / (1 + step))
        adamw.step_if(torch.tensor(step != 2))
        if step == 4:
            adamw.loaded(7)
            adamw.state[parameters[0]]["exp_avg"].fill_(0.5)
    return [*parameters, *(t for p in parameters for t in adamw.state[p].values())]


@pytest.mark.parametrize("without", [None, 0, 2])
def test_kept_tensors_give_torchs_bits(without: int | None) -> None:
    ours, torchs = optimizer(), optimizer()
    tensors = train(ours, without=without)
    assert len(ours._tensors) == len(GROUPS)
    with mock.patch.object(AdamW, "_init_group", torch.optim.AdamW._init_group):
        expected = train(torchs, without=without)
    for a, b in zip(tensors, expected, strict=True):
        assert torch.equal(a, b)


def test_kept_tensors_are_read() -> None:
    """Negative control: states of other tensors give other weights."""
    ours, torchs = optimizer(), optimizer()
    expected = train(torchs)

    def keep_others(self: AdamW, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        init(self, group, *lists)
        for kept in self._tensors.values():
            kept[1][0].clear()
            kept[1][0].extend(torch.zeros_like(p) for p in kept[0])
        return False

    init = AdamW._init_group
    with mock.patch.object(AdamW, "_init_group", keep_others):
        assert not all(map(torch.equal, train(ours), expected))


def test_steps_of_others_keep_nothing() -> None:
    """DeepSpeed steps the optimizer itself, and replaces its tensors."""
    adamw = optimizer()
    for group in adamw.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    adamw.step()
    assert not adamw._tensors


def test_gradients_are_not_kept() -> None:
    parameter = nn.Parameter(torch.ones(4))
    group = ParameterGroup(names=("w",), match=None, lr=1.0, weight_decay=0.0, states=())
    builder = FragmentBuilder(optimizer(), {"w": LocalShard((4,))}, [group], averaged=False)
    pieces = [ParameterPiece("w", parameter, 0, 0, 4, writes=True)]
    for step in range(2):
        gradient = torch.full((4,), float(step))
        [fragment] = builder.gradients(pieces, [gradient])
        assert fragment.data is gradient and fragment.key == "gradient.w" and fragment.writes
        kept = weakref.ref(gradient)
        del gradient, fragment
        assert kept() is None
    [fragment] = builder.gradients([pieces[0]._replace(start=2)], [torch.ones(2)])
    assert fragment.start == 2
