"""What a model asks of attention, and which implementations can compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .flash4 import find_capability_problem
from .order import Implementation

HALF_PRECISION = ("bfloat16", "float16")
MAX_HEAD_DIM = 256
CUDNN_HEAD_DIM = 128
FLASH4_HEAD_DIMS = "of 8 to 128 channels, 256, or 192 with values of 128"
"""On compute capability 10.x; 9.0 takes up to 256."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention, on one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    scale: float
    dtype: str
    """As torch calls it."""
    packed: bool
    """True if the documents of packed rows are one call."""

    def __str__(self) -> str:
        widths = str(self.head_dim)
        if self.value_dim != self.head_dim:
            widths += f" (values of {self.value_dim})"
        shared = f", {self.kv_heads} of keys" if self.kv_heads != self.heads else ""
        window = f", a window of {self.window:,}" if self.window is not None else ""
        return f"{self.heads} heads of {widths}{shared}{window}"


def unsupported_reason(
    implementation: Implementation,
    call: AttentionCall,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Return why an implementation cannot compute a call on a GPU, or None. `capability` is the
    GPU's compute capability; None: unknown, and its own limits do not count."""
    if implementation in ("efficient", "math"):
        return None
    if call.dtype not in HALF_PRECISION:
        return f"it computes in bf16 and fp16, not in {call.dtype}"
    if implementation == "cudnn":
        return _cudnn_reason(call)
    dims = (call.head_dim, call.value_dim)
    if implementation == "flash":
        if max(dims) > MAX_HEAD_DIM:
            return f"its heads have at most {MAX_HEAD_DIM} channels"
        return None if dims[0] == dims[1] else "its keys and values are equally wide"
    if min(dims) < 8 or max(dims) > MAX_HEAD_DIM or any(dim % 8 for dim in dims):
        return f"its heads have a multiple of 8 channels, up to {MAX_HEAD_DIM}"
    if capability is None:
        return None
    if capability[0] == 10 and not (max(dims) <= 128 or dims in ((256, 256), (192, 128))):
        return f"on this GPU it takes heads {FLASH4_HEAD_DIMS}"
    return find_capability_problem(capability)


def _cudnn_reason(call: AttentionCall) -> str | None:
    if call.window is not None:
        return "it takes no windows"
    if max(call.head_dim, call.value_dim) > CUDNN_HEAD_DIM:
        return f"its heads have at most {CUDNN_HEAD_DIM} channels"
    if call.head_dim % 8 or call.value_dim % 8:
        return "its heads have a multiple of 8 channels"
    return None


def find_unsupported(
    order: Sequence[Implementation],
    calls: Sequence[AttentionCall],
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Return the first call that would fail, and why; None if all can be computed.

    torch passes over an implementation that cannot compute a call, but knows the limits of
    FlashAttention 2 alone: flash4 must be able to compute every call in half precision.
    """
    for call in calls:
        reasons = {name: unsupported_reason(name, call, capability) for name in order}
        half_precision = call.dtype in HALF_PRECISION
        if half_precision and reasons.get("flash4") is not None:
            return f"flash4 cannot compute {call}: {reasons['flash4']}"
        if None not in reasons.values():
            listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            return f"none of them can compute {call} ({listed})"
    return None
