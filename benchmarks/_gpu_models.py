"""Models of the GPU benchmarks: shipped configurations, written without YAML.

A GPU machine may have torch and Triton alone, and YAML needs PyYAML and pydantic. A test compares
each model with its file in configs/models. A dry run takes a tiny model with the same operators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.models.config.config import ModelConfig
from headrace.models.config.options import OPTIONS
from headrace.models.config.options.init import InitConfig
from headrace.models.config.options.names import Kernel

SMALL = InitConfig(weights="small", output="wang")


def hybrid(
    pattern: str, vocabulary: int, width: int, groups: int, heads: int, hidden: int
) -> ModelConfig:
    """Return a hybrid of Hyena and attention, or a Transformer, by its pattern."""
    operators = {
        "se": OPTIONS["hyena-se"](groups=groups),
        "mr": OPTIONS["hyena-mr"](groups=groups, filter_horizon=8192),
        "li": OPTIONS["hyena-li"](),
        "attention": OPTIONS["attention"](heads=heads),
        "glu": OPTIONS["glu"](hidden=hidden),
    }
    used = {
        name: operator for name, operator in operators.items() if name in pattern or name == "glu"
    }
    return ModelConfig(
        vocab_size=vocabulary,
        width=width,
        pattern=pattern,
        mlp="glu",
        init=SMALL,
        operators=used,
    )


def mamba2(
    pattern: str, vocabulary: int, width: int, state_size: int, head_dim: int
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary,
        width=width,
        pattern=pattern,
        init=InitConfig(weights="uniform", output="depth"),
        operators={"mamba": OPTIONS["mamba2"](state_size=state_size, head_dim=head_dim)},
    )


MODELS = {
    "hybrid-1b": hybrid("([se, mr, li] * 2 + [attention]) * 3", 32000, 2048, 128, 16, 5504),
    "transformer-1b": hybrid("[attention] * 21", 32000, 2048, 128, 16, 5504),
    "mamba2-1.3b": mamba2("[mamba] * 48", 50288, 2048, 128, 64),
}
TINY = {
    "hybrid-1b": hybrid("[se, mr, li, attention]", 50, 32, 4, 2, 48),
    "transformer-1b": hybrid("[attention]", 50, 32, 4, 2, 48),
    "mamba2-1.3b": mamba2("[mamba]", 50, 32, 16, 16),
}
"""Stand-ins for a dry run."""


@dataclass(frozen=True)
class Wide:
    """Layers of a shipped model at full width, as many as fit into 80 GB, and a micro-batch."""

    model: str
    pattern: str
    kinds: str
    """The same pattern with each of its layers once: their weights stand for all."""
    rows: int
    tokens: int
    tiny: str
    """Stand-in for a dry run."""


WIDE = {
    "llama2-7b, 18 layers": Wide(
        "llama2-7b", "[attention] * 18", "[attention]", 2, 4096, "transformer-1b"
    ),
    "evo2-7b, 18 layers": Wide(
        "evo2-7b-8k",
        "([se, mr, li] * 2 + [attention]) * 2 + [se, mr, li, attention]",
        "[se, mr, li, attention]",
        1,
        8192,
        "hybrid-1b",
    ),
}


def load_wide(name: str, *, kinds: bool = False) -> ModelConfig:
    """Read a model of WIDE from its YAML, with all of its layers or each kind once."""
    from headrace.models.config.config import load_model_config

    config, wide = load_model_config(WIDE[name].model), WIDE[name]
    pattern = wide.kinds if kinds else wide.pattern
    used = {key: value for key, value in config.operators.items() if key in pattern}
    mlp = {config.mlp: config.operators[config.mlp]} if config.mlp else {}
    return replace(config, pattern=pattern, operators={**used, **mlp})


def with_kernels(config: ModelConfig, kernel: Kernel) -> ModelConfig:
    """Return the configuration with this choice of kernels for all operators, norms and the
    loss."""
    operators = {
        name: replace(operator, kernel=kernel)  # type: ignore[call-arg]
        for name, operator in config.operators.items()
    }
    return replace(config, kernel=kernel, operators=operators)
