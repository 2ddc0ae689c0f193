"""Options for Zamba's shared block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .base import FusedOptions, check_divides
from .names import Activation
from .rope import Rope


@dataclass(frozen=True, kw_only=True)
class ZambaBlockOptions(FusedOptions):
    """A shared block; `name>mixer` in the pattern calls it."""

    shared = True
    kind: Literal["zamba-block"] = "zamba-block"
    heads: int
    """Attention heads, over twice the model's width."""
    hidden: int
    """Hidden width of the gated MLP."""
    activation: Activation = "gelu"
    """Gate activation in the MLP."""
    rope: Rope | None = None
    lora_rank: int = 0
    """Rank of the calls' low-rank corrections (LoRA); 0 for none (Zamba-1)."""
    attention_lora: bool = False
    """Correct q, k and v as well as the MLP."""
    norm_eps: float = 1e-5
    """Epsilon in the block's norms."""

    def problems(self, width: int) -> Iterator[str]:
        yield from check_divides("heads", self.heads, "twice the width", 2 * width)
        if self.rope is not None and self.heads > 0:
            yield from self.rope.problems(2 * width // self.heads)
        if self.hidden < 1:
            yield f"hidden must be at least 1, not {self.hidden}"
        if not self.norm_eps > 0:
            yield f"norm_eps must be above 0, not {self.norm_eps}"
        if self.lora_rank < 0 or (self.attention_lora and not self.lora_rank):
            yield f"lora_rank must be above 0 for corrections, not {self.lora_rank}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        return {"heads": self.heads}

    @property
    def attention_heads(self) -> int:
        return self.heads
