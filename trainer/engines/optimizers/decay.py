"""Find the parameters without weight decay, by the rule that `optimizer.decay` chooses.

| parameter                                        | headrace | savanna |
|--------------------------------------------------|----------|---------|
| matrices, embeddings; taps of SE and featurizers | decays   | decays  |
| taps of Hyena-MR                                 | decays   | none    |
| rates, angles and residues of Hyena-LI, S4D      | none     | decays  |
| parameters of the factored Hyena-LI's filter     | none     | none    |
| skip of Hyena-MR and -LI; other vectors          | none     | decays  |
| norms, biases                                    | none     | none    |

Savanna's rule goes by module: norms, the module of MR's filter, and parameters called `bias` in any
module have no decay. Operators that Savanna lacks, such as Mamba or experts, keep headrace's rule.
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
"""Savanna's operators, and their parameters without decay besides norms and biases."""


def headrace(model: Model) -> set[str]:
    """Return vectors, scalars, and the parameters that operators list in `no_decay`."""
    vectors = {name for name, parameter in model.named_parameters() if parameter.ndim < 2}
    return vectors | {
        f"{path}.{name}"
        for path, operator in model.named_modules()
        if isinstance(operator, Operator)
        for name in operator.no_decay
        if getattr(operator, name) is not None
    }


def savanna(model: Model) -> set[str]:
    """Return norms, biases, MR's taps, and by headrace's rule the parameters of operators that
    Savanna lacks."""
    no_decay = {name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"}
    headrace_no_decay = headrace(model)
    for path, module in model.named_modules():
        if isinstance(module, RMSNorm | GatedRMSNorm | LayerNorm):
            no_decay |= {f"{path}.{name}" for name, _ in module.named_parameters()}
        elif isinstance(module, Operator):
            kind = module.options.kind
            if kind in SAVANNA:
                no_decay |= {f"{path}.{name}" for name in SAVANNA[kind]}
            else:
                no_decay |= {name for name in headrace_no_decay if name.startswith(f"{path}.")}
    return no_decay


NO_DECAY: dict[DecayRule, Callable[[Model], set[str]]] = {"headrace": headrace, "savanna": savanna}
