"""Base classes for operator options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from ....console.config import added_field
from .names import Kernel


@dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """Operator options; `kind` is the operator's name in the registry."""

    shared: ClassVar[bool] = False
    """True for a block that feeds other layers (`shared>name` in the pattern)."""
    tokenwise: ClassVar[bool] = False
    """True if each token is mapped by itself, so that generation needs no state."""
    kind: str
    norm_placement: Literal["pre", "post", "both"] = added_field("pre")
    """Norm of the operator's input (pre), of its output before it is added to the residual stream
    (post, as in OLMo 2), or of both (a sandwich)."""
    input_multiplier: float = added_field(1.0)
    """Multiplies the operator's input, after its norm."""
    output_multiplier: float = added_field(1.0)
    """Multiplies what the operator adds to the residual stream, after its norm."""

    def problems(self, width: int) -> Iterator[str]:
        """Yield the errors in these options at this model width, with their numbers."""
        yield from ()

    @property
    def multipliers(self) -> tuple[float, float]:
        """Multipliers of input and output."""
        return self.input_multiplier, self.output_multiplier

    def tp_sizes(self, width: int) -> dict[str, int]:
        """Return the sizes that tp must divide, by name."""
        return {}

    @property
    def couples_rows(self) -> bool:
        """True if a row's result depends, in training, on the other rows in its micro-batch."""
        return False

    def steps(self, device: str) -> bool:
        """True if no kernel takes the whole row: longer rows take more operations."""
        return False

    @property
    def attention_heads(self) -> int | None:
        """Query heads, if there is attention. Context parallelism by a2a splits them."""
        return None

    @property
    def reads_spans(self) -> bool:
        """True if kernels read the documents' ends."""
        return self.attention_heads is not None

    @property
    def state_heads(self) -> int | None:
        """Heads with a state and a transition matrix, if there are any. Context parallelism by a2a
        splits them."""
        return None

    @property
    def expert_count(self) -> int | None:
        """Experts, if there are any. Expert parallelism splits them."""
        return None

    def keep_experts(self, number: int) -> OperatorOptions:
        """Return the options of a rank with so many of the experts."""
        return self


@dataclass(frozen=True, kw_only=True)
class FusedOptions(OperatorOptions):
    """Options for operators with fused kernels."""

    kernel: Kernel = "auto"
    """`auto`: fused kernels on a GPU; unsupported cases run as plain torch, with a warning.
    `triton`: fused kernels; unsupported cases are errors. `torch`: plain torch. The result is the
    same. (Generation, token by token, always uses plain torch.)"""


def check_divides(name: str, divisor: int, total_name: str, total: int) -> Iterator[str]:
    """Yield an error unless `divisor` is positive and divides `total`."""
    if divisor < 1 or total % divisor:
        yield f"{name} ({divisor}) does not divide {total_name} ({total})"
