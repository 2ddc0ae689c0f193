"""Conversion between headrace models and published ones, without loss; families by name."""

from __future__ import annotations

from .bamba import BambaFamily
from .blackmamba import BlackMamba
from .family import Family, Original
from .gpt2 import GPT2Family
from .llama import LlamaFamily, MixtralFamily
from .mamba import Mamba2Family, MambaFamily
from .mamba_ssm import MambaSSM
from .zamba import Zamba2Family, ZambaFamily

FAMILIES: dict[str, Family] = {
    "llama": LlamaFamily(),
    "mixtral": MixtralFamily(),
    "mamba": MambaFamily(),
    "mamba2": Mamba2Family(),
    "bamba": BambaFamily(),
    "gpt2": GPT2Family(),
    "zamba": ZambaFamily(),
    "zamba2": Zamba2Family(),
}
"""Families by transformers' `model_type`. A new family is a class as in family.py, and a line
here."""

ORIGINALS: dict[str, Original] = {"mamba_moe_layers": BlackMamba(), "ssm_cfg": MambaSSM()}
"""Formats whose `config.json` has no `model_type`, by a key that only they have."""
