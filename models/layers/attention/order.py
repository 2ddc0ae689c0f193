"""Order in which torch tries its attention implementations, in all threads: also where the backward
pass recomputes a forward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from ....console.config import added_field
from ...kernels import NEXT
from . import flash4

Implementation = Literal["cudnn", "flash4", "flash", "efficient", "math"]
Programs = Literal["confirmed", "next"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
DEFAULT_ORDER: tuple[Implementation, ...] = ("cudnn", "flash", "efficient", "math")
CPU_IMPLEMENTATIONS = {"flash", "math"}
NONDETERMINISTIC = {"cudnn"}


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Implementations for operations that have several."""

    attention: tuple[Implementation, ...] = DEFAULT_ORDER
    """Attention implementations in order of preference; those left out never run. torch takes the
    first that can compute a call. cudnn: cuDNN; flash: FlashAttention 2, also on CPU; flash4:
    FlashAttention 4 in its place (`pip install "headrace[flash4]"`; H100, H200, B200); efficient:
    for fp32 on GPUs; math: plain torch. `deterministic: true` leaves out cudnn."""
    fft_convolution: Programs = added_field("confirmed")  # noqa: RUF009, it is immutable
    """Programs of free long filters: confirmed, or next."""
    gated_rms_norm: Programs = "confirmed"
    """Programs of Mamba-2's gated norm. next: faster by the counts of their binaries, but on no
    device so far; they are attested like all others."""
    modal: Programs = added_field("confirmed")  # noqa: RUF009, it is immutable
    """Programs of Hyena-LI's modal form: confirmed, or next."""
    rms_norm: Programs = "confirmed"
    """Programs of RMSNorm: confirmed, or next."""
    short_convolution: Programs = added_field("confirmed")  # noqa: RUF009, it is immutable
    """Programs of short filters: confirmed, or next."""
    ssd: Programs = "confirmed"
    """Programs of Mamba-2's scan: confirmed, or next."""
    toeplitz: Programs = added_field("confirmed")  # noqa: RUF009, it is immutable
    """Programs of Hyena-MR's convolution: confirmed, or next."""
    fallback: bool = False
    """Run plain torch in place of fused kernels that fail their attestation before the first step
    on a GPU, and the next implementation in place of one of attention. false: a kernel that fails
    ends the run."""

    def __post_init__(self) -> None:
        if not self.attention or len(set(self.attention)) < len(self.attention):
            raise ValueError(
                f"attention must name each implementation once: {', '.join(IMPLEMENTATIONS)}"
            )
        if {"flash", "flash4"} <= set(self.attention):
            raise ValueError("attention: flash4 takes the place of flash, so name one of them")
        ranked = [name for name in self.attention if name in ("cudnn", "flash", "flash4")]
        if len(ranked) == 2 and ranked[1] == "cudnn":
            raise ValueError(
                f"attention: {ranked[0]} takes all that cudnn does, so put cudnn before {ranked[0]}"
            )

    def next_programs(self) -> list[str]:
        """Return the kernels whose next programs run."""
        return [name for name in NEXT if getattr(self, name) == "next"]

    def order(
        self, *, deterministic: bool, failed: Collection[str] = ()
    ) -> tuple[Implementation, ...]:
        """Return the implementations that may run, in order of preference."""
        excluded = {*failed, *(NONDETERMINISTIC if deterministic else ())}
        return tuple(
            implementation for implementation in self.attention if implementation not in excluded
        )


@contextmanager
def attention_order(order: tuple[Implementation, ...]) -> Iterator[None]:
    """Let torch try these implementations in this order inside."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash4": SDPBackend.FLASH_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    chosen = [backends[implementation] for implementation in order]
    with ExitStack() as stack:
        if "flash4" in order:
            stack.enter_context(flash4.in_place_of_flash())
        stack.enter_context(sdpa_kernel(chosen, set_priority=True))
        yield
