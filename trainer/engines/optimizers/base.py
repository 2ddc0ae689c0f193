"""Define parameter groups and the base class of optimizers.

    gradients ─► sums over copies ─► norm, clip ─► `direct` ─► `step`

ZeRO concatenates the parameters of a group and cuts them anywhere, so `step` must be elementwise.
An optimizer that needs whole matrices computes directions in `direct`, which receives all local
ranges with their positions in the parameter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....models.parallel.axes import ALONE, Axis
from ...checkpoints.fragments import Fragment


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same update rule and the same copies."""

    names: tuple[str, ...]
    match: str | None
    """The pattern in `optimizer.groups` that they match; None: no pattern."""
    lr: float
    """Multiple of the run's learning rate."""
    weight_decay: float
    states: tuple[str, ...]
    """Names of a parameter's state tensors."""
    copies: Axis = ALONE
    """Ranks that hold the same parameters, in the same order."""
    experts: bool = False
    """True for parameters that expert parallelism shards."""
    full_precision: bool = False
    """True for parameters that stay fp32 in a model of half precision."""

    @property
    def frozen(self) -> bool:
        """True for parameters without updates."""
        return self.lr == 0


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer whose state can be saved and loaded."""

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr * group["lr_factor"]

    def state_tensors(self, tensor: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Return a tensor's states. Before the first step they are created as zeros, so that a
        load can fill them."""
        state = self.state[tensor]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
        return {name: state[name] for name in names}

    def loaded(self, steps: int) -> None:
        """Accept overwritten state tensors, as after so many steps."""

    def direct(
        self, gradients: Sequence[Fragment], fragments: Callable[[], list[Fragment]], finite: Tensor
    ) -> None:
        """Replace gradients by directions in place, if these need whole parameters. Collective.

        `fragments` returns this rank's masters and states. If `finite`, a bool on the device, is
        False, no state changes.
        """

    @abstractmethod
    def step_if(self, finite: Tensor) -> None:
        """Run `step`; change nothing if `finite`, a bool on the device, is False."""


def torch_groups(
    groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """Return the groups as torch's optimizers take them."""
    return [
        {
            "params": [parameters[name] for name in group.names],
            "weight_decay": group.weight_decay,
            "lr_factor": group.lr,
            "states": group.states,
        }
        for group in groups
    ]
