"""Order in which torch tries its attention implementations, in all threads: also where the backward
pass recomputes a forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, get_args

Implementation = Literal["cudnn", "flash", "efficient", "math"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
CPU_IMPLEMENTATIONS = {"flash", "math"}
NONDETERMINISTIC = {"cudnn"}


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Implementations for operations that have several."""

    attention: tuple[Implementation, ...] = IMPLEMENTATIONS
    """Attention implementations in order of preference; those left out never run. torch takes the
    first that can compute a call. cudnn: cuDNN; flash: FlashAttention, also on CPU; efficient: for
    fp32 on GPUs; math: plain torch. `deterministic: true` leaves out cudnn."""
    fallback: bool = False
    """Run plain torch in place of fused kernels that fail their attestation before the first step
    on a GPU. false: a kernel that fails ends the run."""

    def __post_init__(self) -> None:
        if not self.attention or len(set(self.attention)) < len(self.attention):
            raise ValueError(
                f"attention must name each implementation once: {', '.join(IMPLEMENTATIONS)}"
            )
        ranked = [
            implementation
            for implementation in self.attention
            if implementation in ("cudnn", "flash")
        ]
        if ranked == ["flash", "cudnn"]:
            raise ValueError(
                "attention: flash takes all that cudnn does, so put cudnn before flash"
            )

    def order(self, *, deterministic: bool) -> tuple[Implementation, ...]:
        """Return the implementations that may run, in order of preference."""
        excluded = NONDETERMINISTIC if deterministic else set()
        return tuple(
            implementation for implementation in self.attention if implementation not in excluded
        )


def attention_order(order: tuple[Implementation, ...]) -> AbstractContextManager[object]:
    """Return a context in which torch tries these implementations in this order."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    return sdpa_kernel([backends[implementation] for implementation in order], set_priority=True)
