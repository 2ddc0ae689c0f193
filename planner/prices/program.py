"""What a training program does that changes prices: ours, or that of a published run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainingProgram:
    """The defaults are headrace's trainer."""

    traffic: float = 1.0
    """Bytes that memory moves beside products, relative to those of our fused kernels."""
    fp8_backward: float = 0.5
    """Part of a backward pass's products in FP8; ours computes weights' gradients in bf16."""
    fp8_experts: bool = False
    """True if products of experts are in FP8, too."""
    fp8_casts: Literal["none", "experts", "all"] = "none"
    """Products whose factors are rounded to FP8 by kernels of their own; ours by those that compute
    them."""
    tensor_gather_bytes: int | None = None
    """Bytes per number in a gather among tensor ranks; None: as the run's precision."""
    gather_bytes: int | None = None
    """Bytes per weight in a gather; None: as the run's precision."""
    gradient_bytes: int = 4
    """Bytes per number in a reduced gradient."""
    async_tensor: bool = False
    """True if products run beside the tensor ranks' messages for their parts."""
    async_experts: bool = False
    """True if computation runs beside the expert ranks' messages."""
    experts_by_node: bool = False
    """True if a row travels once to each node, and there to its experts."""
    ring_traffic: float = 1.0
    """Bytes that memory moves to merge a ring's parts, relative to ours."""
    attention_share: float = 1.0
    """Attention of the busiest context rank, relative to an even share."""
    recompute_messages: bool = True
    """True if recomputing single operations repeats a layer's messages; whole blocks always do."""
    update_bytes: int = 30
    """Bytes that an optimizer step reads and writes per local parameter: gradients, masters and two
    moments in fp32, and weights in compute precision."""
