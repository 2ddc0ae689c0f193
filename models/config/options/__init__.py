"""Operator options by YAML name, and other choices that need no torch.

A new operator is a file here, a file in `operators/`, and a line in both tables.
"""

from __future__ import annotations

from .attention import AttentionOptions
from .base import OperatorOptions
from .delta import DeltaOptions
from .hyena_li import HyenaLIOptions
from .hyena_li_factored import HyenaLIFactoredOptions
from .hyena_li_freeform import HyenaLIFreeformOptions
from .hyena_li_s4d import HyenaLIS4DOptions
from .hyena_mlp import HyenaMLPOptions
from .hyena_mr import HyenaMROptions
from .hyena_se import HyenaSEOptions
from .mamba1 import Mamba1Options
from .mamba2 import Mamba2Options
from .mla import MLAOptions
from .mlp import GLUOptions, MLPOptions
from .moe import MoEOptions
from .zamba import ZambaBlockOptions

OPTIONS: dict[str, type[OperatorOptions]] = {
    "attention": AttentionOptions,
    "mla": MLAOptions,
    "mamba1": Mamba1Options,
    "mamba2": Mamba2Options,
    "delta": DeltaOptions,
    "hyena-se": HyenaSEOptions,
    "hyena-mr": HyenaMROptions,
    "hyena-li": HyenaLIOptions,
    "hyena-li-freeform": HyenaLIFreeformOptions,
    "hyena-li-s4d": HyenaLIS4DOptions,
    "hyena-li-factored": HyenaLIFactoredOptions,
    "glu": GLUOptions,
    "mlp": MLPOptions,
    "hyena-mlp": HyenaMLPOptions,
    "moe": MoEOptions,
    "zamba-block": ZambaBlockOptions,
}
