"""AdamW, and which parameters its weight decay touches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..checkpoints.fragments import MOMENTS

STEP = "step"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW. The learning rate's course is the mixture's; this is its peak."""

    lr: float = 3e-4
    """The run's peak; phases give multiples of it."""
    beta1: float = 0.9
    """How much of the mean gradient a step keeps."""
    beta2: float = 0.95
    """How much of the mean squared gradient a step keeps."""
    eps: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.1
    """On matrices; norms, biases, gains, and the rates of scans have none."""
    clip: float = 1.0
    """The norm of all gradients is cut to this; 0 leaves it."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be {what}, not {getattr(self, name)}"
            for name, what, right in (
                ("lr", "above 0", self.lr > 0),
                ("beta1", "in [0, 1)", 0 <= self.beta1 < 1),
                ("beta2", "in [0, 1)", 0 <= self.beta2 < 1),
                ("eps", "above 0", self.eps > 0),
                ("weight_decay", "at least 0", self.weight_decay >= 0),
                ("clip", "at least 0", self.clip >= 0),
            )
            if not right
        ]
        if wrong:
            raise ValueError("; ".join(wrong))


def build(
    parameters: Mapping[str, nn.Parameter], undecayed: Collection[str], config: OptimizerConfig
) -> torch.optim.AdamW:
    decayed = [p for name, p in parameters.items() if name not in undecayed]
    others = [p for name, p in parameters.items() if name in undecayed]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, config.weight_decay), (others, 0.0))
        if params
    ]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def moments(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Adam's moments of one tensor; zeros where it has not been updated yet."""
    state = optimizer.state[tensor]
    if not state:
        # As torch creates it at the first update, so that a load has somewhere to go.
        state[STEP] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        for name in MOMENTS:
            state[name] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
    return {name: state[name] for name in MOMENTS}


def set_updates(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Tell Adam how many updates its moments have seen: its bias correction depends on it."""
    for state in optimizer.state.values():
        state[STEP].fill_(updates)
