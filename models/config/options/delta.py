"""Options of the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .base import FusedOptions, check_divides
from .names import DeltaKernel, Kernel


@dataclass(frozen=True, kw_only=True)
class DeltaOptions(FusedOptions):
    """Gated delta rule: gated DeltaNet (`decay: head`) and Kimi Delta Attention (`decay:
    channel`)."""

    kind: Literal["delta"] = "delta"
    kernel: DeltaKernel = "auto"  # type: ignore[assignment]
    """As of other operators. `fla`: the scan by the kernels of flash-linear-attention, which must
    be installed, on a GPU; rows over several ranks need `layout.delta=a2a`."""
    heads: int
    """Heads of queries and keys."""
    value_heads: int | None = None
    """Heads of values, each with a state, a decay and a β: a multiple of `heads`, whose queries and
    keys they share. Equal to `heads` if unset."""
    key_head_dim: int = 128
    """Channels of a query and a key: rows of the state."""
    value_head_dim: int = 128
    """Channels of a value: columns of the state."""
    decay: Literal["head", "channel"] = "head"
    """`head`: one decay for a state (gated DeltaNet). `channel`: one for each key channel, a row of
    the state (KDA)."""
    decay_rank: int | None = None
    """Project to the decays through so many channels; unset: by one matrix."""
    max_beta: Literal[1, 2] = 1
    """β is max_beta · sigmoid: with 2, a state's eigenvalues reach −1."""
    conv: int = 4
    """Taps in the short convolution of q, k and v."""
    qk_norm: bool = True
    """Divide queries and keys by their length."""
    gate: Literal["silu", "sigmoid"] | None = "silu"
    """Activation of the gate that multiplies the normed outputs; unset: no gate."""
    gate_rank: int | None = None
    """Project to the gate through so many channels; unset: by one matrix."""
    norm_eps: float = 1e-5
    """Epsilon in the norm of each head's output."""
    chunk: int = 64
    """Tokens per block of plain torch; affects the speed, not the result."""

    def steps(self, device: str) -> bool:
        return True

    def problems(self, width: int) -> Iterator[str]:
        names = ["heads", "key_head_dim", "value_head_dim", "conv", "chunk"]
        names += [name for name in ("decay_rank", "gate_rank") if getattr(self, name) is not None]
        for name in names:
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, not {getattr(self, name)}"
        if self.value_heads is not None:
            yield from check_divides("heads", self.heads, "value_heads", self.value_heads)
            if self.value_heads < 1:
                yield f"value_heads must be at least 1, not {self.value_heads}"
        if self.gate is None and self.gate_rank is not None:
            yield f"gate_rank ({self.gate_rank}) has no effect without a gate"
        if not self.norm_eps > 0:
            yield f"norm_eps must be above 0, not {self.norm_eps}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        sizes = {
            "value heads": self.state_heads,
            "channels of queries": self.heads * self.key_head_dim,
        }
        for name in ("decay_rank", "gate_rank"):
            if getattr(self, name) is not None:
                sizes[name] = getattr(self, name)
        return sizes

    @property
    def own_kernel(self) -> Kernel:
        """`kernel` for the operator's other parts, which fla does not compute."""
        return "auto" if self.kernel == "fla" else self.kernel

    @property
    def reads_spans(self) -> bool:
        return self.kernel == "fla"

    @property
    def state_heads(self) -> int:
        return self.heads if self.value_heads is None else self.value_heads

    @property
    def decays(self) -> int:
        """Decays of a token in each state."""
        return self.key_head_dim if self.decay == "channel" else 1
