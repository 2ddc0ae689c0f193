"""Every operator, by the name that a YAML gives it. A new one is a file, and a line here."""

from __future__ import annotations

from .attention import Attention
from .base import Context, Operator, Options, State
from .hyena_li import HyenaLI
from .hyena_mr import HyenaMR
from .hyena_se import HyenaSE
from .mamba2 import Mamba2
from .mlp import GLU, MLP

OPERATORS: dict[str, type[Operator]] = {
    "attention": Attention,
    "mamba2": Mamba2,
    "hyena-se": HyenaSE,
    "hyena-mr": HyenaMR,
    "hyena-li": HyenaLI,
    "glu": GLU,
    "mlp": MLP,
}

OPTIONS: dict[str, type[Options]] = {name: kind.Options for name, kind in OPERATORS.items()}

__all__ = ["OPERATORS", "OPTIONS", "Context", "Operator", "Options", "State"]
