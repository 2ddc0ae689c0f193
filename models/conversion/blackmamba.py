"""BlackMamba folders: `config.json` without `model_type`, and `pytorch_model.bin`.

`mamba_moe_layers` names each layer: `r` is Mamba, `1` a gated MLP, `8` eight experts; `r1` and `r8`
are both at once, side by side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...console.errors import ConfigProblem, ConfigProblems
from ..config.config import ModelConfig
from ..config.options.base import OperatorOptions
from ..config.options.mamba1 import Mamba1Options
from ..config.options.mlp import GLUOptions
from ..config.options.moe import MoEOptions
from .family import TRANSFORMERS, Published, build_pattern, expect
from .mamba import INIT, MAMBA1_NAMES
from .names import Names, experts, operator_rules
from .rules import Rule, map_same

LAYER = re.compile(r"r[1-9]?|[1-9]")
"""Their code reads a single digit in a layer's name."""


NAMES: dict[type[OperatorOptions], Names] = {
    Mamba1Options: MAMBA1_NAMES,
    GLUOptions: {"gate_up": "linear_fc1", "down": "linear_fc2"},
    MoEOptions: {
        "router": "router",
        "gate_up": experts("local_experts.*.linear_fc1.weight"),
        "down": experts("local_experts.*.linear_fc2.weight"),
    },
}


class BlackMamba:
    """BlackMamba as its published code computes it: the gates are GELUs, the last norm is a layer
    norm. Training used `balance_over: micro-batch`; the option does not change evaluation."""

    published = Published(
        family="BlackMamba",
        models="1.5B, 2.8B",
        operators=("mamba1", "glu", "moe"),
        files="config.json, pytorch_model.bin",
        writes=False,
        tested_with=f"{TRANSFORMERS}: MambaMixer, and the published code's router",
    )

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        expect(settings, swiglu=True, add_bias_linear=False)
        kinds = [str(kind) for kind in settings["mamba_moe_layers"]]
        invalid = sorted({kind for kind in kinds if not LAYER.fullmatch(kind)})
        problems = [
            ConfigProblem("mamba_moe_layers", f"`{kind}` is not a layer: r, 1 to 9, or r1 to r9")
            for kind in invalid
        ]
        if len(kinds) != settings["num_layers"]:
            message = f"names {len(kinds)} layers, and num_layers is {settings['num_layers']}"
            problems.append(ConfigProblem("mamba_moe_layers", message))
        if problems:
            raise ConfigProblems(problems)
        hidden = settings["ffn_hidden_size"] or 4 * settings["hidden_size"]
        operators: dict[str, OperatorOptions] = {
            "mamba": Mamba1Options(
                state_size=settings["state_size"],
                expand=settings["expansion_factor"],
                conv=settings["conv_dimension"],
            ),
            "mlp": GLUOptions(hidden=hidden, activation="gelu"),
        }
        for count in {int(kind[-1]) for kind in kinds if kind[-1] not in "r1"}:
            operators[f"moe{count}"] = MoEOptions(
                experts=count,
                top_k=1,
                hidden=hidden,
                activation="gelu",
                router="sigmoid",
                sinkhorn=True,
            )
        return ModelConfig(
            vocab_size=settings["vocab_size"],
            width=settings["hidden_size"],
            **build_pattern([format_layer(kind) for kind in kinds], operators),
            final_norm="layer",
            init=INIT,
        )

    def rules(self, config: ModelConfig) -> list[Rule]:
        embedding = ("embedding.word_embeddings.weight", "embedding.weight")
        result = [replace(map_same("embedding.weight", embedding[0]), prefixes=embedding)]
        for kind in ("weight", "bias"):
            result.append(map_same(f"norm.{kind}", f"decoder.final_layernorm.{kind}"))
        for number, layer in enumerate(config.layers):
            ours, theirs = f"blocks.{number}", f"decoder.layers.{number}"
            for branch, name, norm, module in (
                ("mixer", layer.mixer, "norm", "mixer"),
                ("mlp", layer.mlp, "norm_moe", "moe"),
            ):
                if name is not None:
                    result.append(
                        map_same(f"{ours}.{branch}.norm.weight", f"{theirs}.{norm}.weight")
                    )
                    options = config.operators[name]
                    result += operator_rules(
                        NAMES[type(options)],
                        f"{ours}.{branch}.operator",
                        f"{theirs}.{module}",
                        options,
                        config.width,
                    )
        return result


def format_layer(kind: str) -> str:
    """Return the layer in our pattern."""
    mlp = {"": "", "1": "mlp"}.get(kind.removeprefix("r"), f"moe{kind[-1]}")
    if not kind.startswith("r"):
        return mlp
    return f"mamba&{mlp}" if mlp else "mamba"
