"""Multi-head latent attention options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from .base import FusedOptions
from .names import AttentionForm
from .rope import Rope


@dataclass(frozen=True, kw_only=True)
class MLAOptions(FusedOptions):
    """Multi-head latent attention (DeepSeek V2, V3; Kimi Linear): keys and values of all heads are
    projections of a small latent vector for each token, which generation keeps in their place."""

    kind: Literal["mla"] = "mla"
    heads: int
    """Heads; each has its own keys and values."""
    q_lora_rank: int | None = None
    """Width of the queries' latent; null: queries are projections of the input."""
    kv_lora_rank: int
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int
    """Channels of each head's queries and keys without positions."""
    qk_rope_head_dim: int
    """Channels of each head's queries and keys with positions; all heads share these keys."""
    v_head_dim: int
    """Channels of each head's values."""
    rope: Rope | None = field(default_factory=Rope)
    """Turns the qk_rope_head_dim channels; null for no positions (Kimi Linear)."""
    softmax_scale: float | None = None
    """Multiplies the scores before the softmax; (qk_nope_head_dim + qk_rope_head_dim)^−½ if
    unset."""
    norm_eps: float = 1e-6
    """Epsilon in the latents' norms."""

    def problems(self, width: int) -> Iterator[str]:
        sizes = ("heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for name in (*sizes, *(["q_lora_rank"] if self.q_lora_rank is not None else [])):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, not {getattr(self, name)}"
        if self.rope is not None:
            turning, rope_dim = self.rope.channels, self.qk_rope_head_dim
            if turning is not None and turning != rope_dim:
                yield f"rope turns all {rope_dim} channels of qk_rope_head_dim: {turning}"
            else:
                yield from self.rope.problems(rope_dim)
        for name in ("softmax_scale", "norm_eps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield f"{name} must be above 0, not {value}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        return {"heads": self.heads}

    @property
    def attention_heads(self) -> int:
        return self.heads

    @property
    def window(self) -> None:
        """Queries see their whole past."""

    @property
    def kv_heads(self) -> None:
        """Each head has its own keys and values."""

    @property
    def qk_head_dim(self) -> int:
        """Channels of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def head_dim(self) -> int:
        """Channels of a head in the product: queries, keys and values are padded to the widest."""
        return max(self.qk_head_dim, self.v_head_dim)

    @property
    def latent_width(self) -> int:
        """Numbers of a token from which keys and values of all heads follow."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def sends_latents(self, form: AttentionForm, tp: int, cp: int) -> bool:
        """Return True if context ranks send latents in place of the keys and values of a tensor
        rank's heads: if these are fewer numbers. An exchange of heads sends latents to all ranks,
        keys and values to one; a ring sends both as often."""
        copies = cp if form == "a2a" else 1
        return copies * self.latent_width < 2 * (self.heads // tp) * self.head_dim
