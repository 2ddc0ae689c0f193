"""Settings that all optimizers have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from torch import nn

    from ....models.model.model import Model
    from .base import Optimizer, ParameterGroup

DecayRule = Literal["headrace", "savanna"]


Limits = Sequence[tuple[str, str, bool]]
"""Field, limit in words, and whether the field meets it."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Learning rate and weight decay for parameters that match a pattern."""

    match: str
    """Name pattern: `blocks.*.mixer.operator.*`, or with an operator's name or kind in place of
    `mixer.operator` and `mlp.operator`: `blocks.*.hyena*`. `*` matches dots as well. A pattern that
    matches no parameter is an error."""
    lr: float = 1.0
    """Multiple of the run's learning rate. 0 freezes the parameters: they have no gradient, no part
    in the norm, no optimizer state and no average; checkpoints hold their masters alone."""
    weight_decay: float | None = None
    """Left out: the optimizer's. Parameters that the rule `decay` spares have none in any case."""

    def __post_init__(self) -> None:
        require(
            self,
            [
                ("lr", "at least 0", self.lr >= 0),
                ("weight_decay", "at least 0", (self.weight_decay or 0) >= 0),
            ],
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(ABC):
    """Settings that every optimizer has."""

    kind: str
    lr: float = 3e-4
    """Peak learning rate of the run; phases give multiples of it."""
    weight_decay: float = 0.1
    """Decay for matrices; norms, biases, gains, and scans' rates have none (`decay`)."""
    decay: DecayRule = "headrace"
    """Rule for which parameters decay. `headrace`: matrices, but no vectors (skips, gains) and no
    rates of scans (`A_log`, `D`, `dt_bias`; rates, angles and residues of Hyena-LI). `savanna`: as
    Savanna does, with decay of rates, residues and skips, and none of Hyena-MR's taps; operators
    that Savanna lacks follow `headrace`. `--dry-run` lists both sides."""
    clip: float = 1.0
    """Maximum norm over all gradients; 0: no limit."""
    ema: float | None = None
    """Decay of the weights' moving average, such as 0.9999: an applied step keeps this fraction and
    adds the remainder from the new weights. Step n keeps at most (1 + n) / (10 + n), so that the
    initial weights are forgotten soon (0.9999 is reached at step 89,990). The average is fp32 and
    sharded like the masters, 4 bytes per parameter; it changes no bit of the training. Checkpoints
    hold it, and `--ema` reads it. Left out: none."""
    groups: tuple[GroupConfig, ...] = ()
    """Parameters with a separate learning rate or weight decay. The first match counts."""

    def __post_init__(self) -> None:
        require(self, self.limits())

    def limits(self) -> list[tuple[str, str, bool]]:
        """Return the limits of the fields."""
        return [
            ("lr", "above 0", self.lr > 0),
            ("weight_decay", "at least 0", self.weight_decay >= 0),
            ("clip", "at least 0", self.clip >= 0),
            ("ema", "in (0, 1)", self.ema is None or 0 < self.ema < 1),
        ]

    @abstractmethod
    def describe(self) -> str:
        """Return name and settings in a line for people."""

    def describe_average(self) -> str:
        return "" if self.ema is None else f", average {self.ema:g}"

    @abstractmethod
    def states(self, model: Model) -> dict[str, tuple[str, ...]]:
        """Return the names of state tensors by parameter. A state is an fp32 tensor in the
        parameter's shape, called `<state>.<parameter>` in a checkpoint."""

    on_host: ClassVar[bool] = True
    """True if the CPU is fast enough to update states in host memory."""

    @abstractmethod
    def build(
        self, model: Model, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]
    ) -> Optimizer:
        """Build the optimizer for this rank's parameters."""


def require(config: object, limits: Limits) -> None:
    """Raise a ValueError that names all fields outside their limits."""
    problems = [
        f"{name} must be {limit}, not {getattr(config, name)}"
        for name, limit, is_met in limits
        if not is_met
    ]
    if problems:
        raise ValueError("; ".join(problems))
