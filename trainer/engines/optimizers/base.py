"""Base of all optimizers: parameter groups, and the arithmetic of one step.

    gradients ─► sums over copies ─► norm, clip ─► `direct` ─► `step`

ZeRO lays the parameters of a group end to end and cuts them anywhere, so `step` must work element
by element. An optimizer that needs whole matrices computes its directions in `direct`, which
receives every local range with its place in the parameter.
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
    """Parameters that are updated alike and have the same copies."""

    names: tuple[str, ...]
    match: str | None
    """The pattern of `optimizer.groups` that chose them; None: no pattern."""
    lr: float
    """Multiple of the run's learning rate."""
    weight_decay: float
    states: tuple[str, ...]
    """Names of the state tensors of each parameter."""
    copies: Axis = ALONE
    """Ranks that hold the same parameters, in the same order."""
    experts: bool = False
    """True for parameters that expert parallelism shards."""
    full_precision: bool = False
    """True for parameters that are fp32 beside weights of half precision."""

    @property
    def frozen(self) -> bool:
        """True for parameters that no step changes, whatever the schedule's learning rate."""
        return self.lr == 0


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer whose state a checkpoint can hold."""

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr * group["lr_factor"]

    def state_of(self, tensor: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the state tensors of one tensor; create them as zeros before the first step, so
        that a load can fill them."""
        state = self.state[tensor]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
        return {name: state[name] for name in names}

    def loaded(self, steps: int) -> None:
        """Accept state tensors that were written to from outside, after this number of steps."""

    def direct(
        self, gradients: Sequence[Fragment], held: Callable[[], list[Fragment]], finite: Tensor
    ) -> None:
        """Replace gradients by directions in place, where `step` needs whole parameters to find
        them. `held` returns this rank's fragments of masters and states. Where `finite`, a bool on
        the device, is False, change no state. Collective."""

    @abstractmethod
    def step_if(self, finite: Tensor) -> None:
        """Run `step`; change nothing where `finite`, a bool on the device, is False."""


def torch_groups(
    groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """Return the groups in the form that torch's optimizers take."""
    return [
        {
            "params": [parameters[name] for name in group.names],
            "weight_decay": group.weight_decay,
            "lr_factor": group.lr,
            "states": group.states,
        }
        for group in groups
    ]
