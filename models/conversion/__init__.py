"""Conversion between headrace models and published ones, without loss; families by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .bamba import BAMBA
from .blackmamba import BlackMamba
from .deepseek import DEEPSEEK_V3
from .falcon import FALCON_H1
from .family import Family, Original
from .gpt2 import GPT2
from .gpt_oss import GPT_OSS
from .granite import GRANITE
from .kimi import KIMI_LINEAR
from .lfm import LFM2
from .lfm3 import LFM3
from .llama import LLAMA, MIXTRAL, QWEN2, QWEN3
from .mamba import MAMBA, MAMBA2
from .mamba_ssm import MambaSSM
from .nemotron import NEMOTRON_H
from .olmo import OLMO2, OLMO3, OLMO_HYBRID
from .qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from .stripedhyena import select_layout
from .zamba import Zamba2Family, ZambaFamily

_FAMILIES: tuple[Family, ...] = (
    *(LLAMA, MIXTRAL, QWEN2, QWEN3, MAMBA, MAMBA2, BAMBA, GPT2, LFM2, LFM3),
    *(OLMO2, OLMO3, OLMO_HYBRID, QWEN3_5, QWEN3_NEXT, QWEN3_5_MOE),
    *(NEMOTRON_H, GRANITE, FALCON_H1, KIMI_LINEAR, GPT_OSS, DEEPSEEK_V3),
    *(ZambaFamily(), Zamba2Family()),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}
"""Families by transformers' `model_type`. A new family is tables as in decoder.py, and a name
here. A model is written as the first that can represent it."""

ORIGINALS: dict[str, Callable[[Mapping[str, Any]], Original]] = {
    "mamba_moe_layers": lambda settings: BlackMamba(),
    "ssm_cfg": lambda settings: MambaSSM(),
    "hyena_layer_idxs": select_layout,
}
"""Formats that are only read, by a key of `config.json` that only they have: functions that return
the format in the layout that the settings name."""
