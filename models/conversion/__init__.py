"""Published models to and from folders that transformers loads, by name and without loss."""

from __future__ import annotations

from .bamba import Bamba
from .family import Family
from .gpt2 import GPT2
from .llama import Llama, Mixtral
from .mamba import Mamba, Mamba2
from .zamba import Zamba, Zamba2

FAMILIES: dict[str, Family] = {
    "llama": Llama(),
    "mixtral": Mixtral(),
    "mamba": Mamba(),
    "mamba2": Mamba2(),
    "bamba": Bamba(),
    "gpt2": GPT2(),
    "zamba": Zamba(),
    "zamba2": Zamba2(),
}
"""By transformers' `model_type`. A new one is a class with `read`, `write` and `rules`."""
