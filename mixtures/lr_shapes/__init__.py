"""Learning-rate shapes: a file per shape, and the table of names.

A shape is a frozen dataclass derived from `LearningRate`, whose fields are the keys of `lr` in the
YAML. Parsing, checks, plans, plots and `mixtures new` find it in `SHAPES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...console.errors import PlanError
from .constant import Constant
from .cosine import Cosine
from .exponential import Exponential
from .linear import Linear
from .savanna import Savanna
from .shape import LearningRate
from .wsd import WarmupStableDecay

SHAPES: dict[str, type[LearningRate]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "exponential": Exponential,
    "wsd": WarmupStableDecay,
    "savanna": Savanna,
}
DEFAULT_SHAPE = "constant"


def load_shape(lr: Mapping[str, Any]) -> LearningRate:
    """Build the learning rate from a plan's settings for a phase."""
    name = lr.get("shape", DEFAULT_SHAPE)
    if name not in SHAPES:
        raise PlanError(
            f"the plan uses the learning-rate shape `{name}`, which this headrace does not have",
            hint=f"known shapes: {', '.join(SHAPES)}; add it to mixtures/lr_shapes, or make the "
            "plan again",
        )
    return SHAPES[name](**lr)
