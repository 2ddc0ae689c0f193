"""Operator registry, by YAML name. A new operator is a file and a line here."""

from __future__ import annotations

from .attention import Attention
from .base import BatchContext, Operator, SharedOperator, State
from .delta import Delta
from .hyena_li import HyenaLI
from .hyena_li_factored import HyenaLIFactored
from .hyena_li_freeform import HyenaLIFreeform
from .hyena_li_s4d import HyenaLIS4D
from .hyena_mlp import HyenaMLP
from .hyena_mr import HyenaMR
from .hyena_se import HyenaSE
from .mamba1 import Mamba1
from .mamba2 import Mamba2
from .mla import MLA
from .mlp import GLU, MLP
from .moe import MoE
from .zamba import ZambaBlock

OPERATORS: dict[str, type[Operator]] = {
    "attention": Attention,
    "mla": MLA,
    "mamba1": Mamba1,
    "mamba2": Mamba2,
    "delta": Delta,
    "hyena-se": HyenaSE,
    "hyena-mr": HyenaMR,
    "hyena-li": HyenaLI,
    "hyena-li-freeform": HyenaLIFreeform,
    "hyena-li-s4d": HyenaLIS4D,
    "hyena-li-factored": HyenaLIFactored,
    "glu": GLU,
    "mlp": MLP,
    "hyena-mlp": HyenaMLP,
    "moe": MoE,
    "zamba-block": ZambaBlock,
}

__all__ = [
    "OPERATORS",
    "BatchContext",
    "Operator",
    "SharedOperator",
    "State",
]
