"""AdamW (Loshchilov & Hutter, arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Optimizer
from .states import ADAM

STEP = "step"


class AdamW(Optimizer, torch.optim.AdamW):
    """torch's AdamW, whose state exists before the first step."""

    found_inf: Tensor | None = None
    """1 on the device if the step must change nothing, else 0; the fused kernel reads it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._keeps_tensors = False
        """True if no one but this class replaces state tensors."""
        self._tensors: dict[int, tuple[list[Tensor], tuple[list[Tensor], ...]]] = {}
        """Parameters and state tensors of groups in which all have gradients, by the group's id."""

    def state_tensors(self, tensor: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        if names == ADAM and not self.state[tensor]:
            # As torch creates it at the first step.
            step = torch.zeros((), dtype=torch.float32, device=tensor.device)
            self.state[tensor][STEP] = step
        return super().state_tensors(tensor, names)

    def step_if(self, finite: Tensor) -> None:
        self.found_inf = finite.logical_not().float()
        self._keeps_tensors = True
        self.step()

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill lists of parameters, gradients and state tensors, as torch does, which asks each
        parameter for them in each step."""
        parameters, gradients, *states = lists
        kept_parameters, kept_states = self._tensors.get(id(group), (None, ()))
        if kept_parameters is group["params"]:
            gradients += [p.grad for p in kept_parameters if p.grad is not None]
            if len(gradients) == len(kept_parameters):
                parameters += kept_parameters
                for state, kept in zip(states, kept_states, strict=True):
                    state += kept
                return False
            gradients.clear()
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        if self._keeps_tensors and len(parameters) == len(group["params"]) and not has_complex:
            self._tensors[id(group)] = group["params"], tuple(map(list, states))
        return has_complex

    def loaded(self, steps: int) -> None:
        """Set the number of steps in the moments, on which the bias correction depends."""
        for state in self.state.values():
            if STEP in state:
                state[STEP].fill_(steps)
