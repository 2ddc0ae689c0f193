"""Rules for weight decay: each names the parameters that have none. `optimizer.decay` chooses one.

| parameter                                        | headrace | savanna |
|--------------------------------------------------|----------|---------|
| matrices, embeddings; taps of SE and featurizers | decays   | decays  |
| taps of Hyena-MR                                 | decays   | none    |
| rates, angles and residues of Hyena-LI, S4D      | none     | decays  |
| parameters of the factored Hyena-LI's filter     | none     | none    |
| skip of Hyena-MR and -LI; other vectors          | none     | decays  |
| norms, biases                                    | none     | none    |

Savanna's rule goes by module: its norms and the module of MR's filter have no decay, and of all
other modules the parameters called `bias`. It has no operators such as Mamba or experts; those keep
headrace's rule.
"""

from __future__ import annotations

from collections.abc import Callable

from ....models.layers.norms import GatedRMSNorm, LayerNorm, RMSNorm
from ....models.model.model import Model
from ....models.operators import Operator
from .config import DecayRule

SAVANNA: dict[str, tuple[str, ...]] = {
    "attention": (),
    "glu": (),
    "mlp": (),
    "hyena-se": (),
    "hyena-mr": ("taps",),
    "hyena-li": (),
    "hyena-li-freeform": (),
    "hyena-li-s4d": (),
    "hyena-li-factored": ("steps", "poles", "residues"),
    "hyena-mlp": (),
}
"""Operators that Savanna has, with their parameters without decay beside norms and biases."""


def headrace(model: Model) -> set[str]:
    """Spare vectors and scalars, and the parameters that operators name themselves."""
    flat = {name for name, parameter in model.named_parameters() if parameter.ndim < 2}
    return flat | {
        f"{path}.{name}"
        for path, operator in model.named_modules()
        if isinstance(operator, Operator)
        for name in operator.no_decay
    }


def savanna(model: Model) -> set[str]:
    """Spare norms, biases and MR's taps; operators that Savanna lacks keep headrace's rule."""
    spared = {name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"}
    ours = headrace(model)
    for path, module in model.named_modules():
        if isinstance(module, RMSNorm | GatedRMSNorm | LayerNorm):
            spared |= {f"{path}.{name}" for name, _ in module.named_parameters()}
        elif isinstance(module, Operator):
            kind = module.options.kind
            if kind in SAVANNA:
                spared |= {f"{path}.{name}" for name in SAVANNA[kind]}
            else:
                spared |= {name for name in ours if name.startswith(f"{path}.")}
    return spared


NO_DECAY: dict[DecayRule, Callable[[Model], set[str]]] = {"headrace": headrace, "savanna": savanna}
