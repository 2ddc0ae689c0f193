"""A model from Savanna's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ....console.errors import ConfigProblem
from ...config.config import ModelConfig
from ...config.options import OPTIONS
from ...config.options.base import OperatorOptions
from ...config.options.init import InitConfig
from ...config.options.names import NormKind
from ...config.options.rope import Rope
from ..family import build_pattern
from .keys import MIXERS
from .limits import REFUSED
from .settings import SavannaSettings, harmless

BYTES = 512
"""Vocabulary size in Savanna's CharLevelTokenizer."""
GPT2 = 50257
OPERATOR_WIDTH = 32
"""Savanna rounds expanded operator widths up to multiples of this."""
ACTIVATIONS = {"gelu": "gelu", "silu": "silu", "relu": "relu", "identity": "identity"}
INIT = {
    ("small_init", "wang_init"): ("small", "wang"),
    ("small_init", "small_init"): ("small", "same"),
    ("normal", "wang_init"): ("normal", "wang"),
    ("normal", "normal"): ("normal", "same"),
    ("normal", "scaled_normal"): ("normal", "depth"),
}
"""Initial distributions that headrace has, for inputs and outputs."""


def convert_model(settings: SavannaSettings) -> ModelConfig:
    """Return the model, or raise for all keys that would make it another one."""
    problems = [
        ConfigProblem(
            key, f"{settings.values_by_key.get(key, limit[0])!r} is not expressible: {limit[2]}"
        )
        for key, limit in REFUSED.items()
        if not harmless(settings.values_by_key.get(key), limit)
    ]
    reader = _Reader(settings, problems)
    model = reader.model()
    if problems:
        raise settings.refusal(*problems)
    assert model is not None
    return model


class _Reader:
    def __init__(self, settings: SavannaSettings, problems: list[ConfigProblem]) -> None:
        self.settings = settings
        self.problems = problems
        self.width = settings.integer("hidden_size")

    def refuse(self, key: str, why: str) -> None:
        self.problems.append(
            ConfigProblem(key, f"{self.settings[key]!r} is not expressible: {why}")
        )

    def model(self) -> ModelConfig | None:
        settings = self.settings
        mixers = self.mixers()
        operators: dict[str, OperatorOptions] = {}
        builders = {"attention": self.attention, "se": self.se, "mr": self.mr, "li": self.li}
        for name in dict.fromkeys(mixers):
            operators[name] = builders[name]()
        names, mlp = self.add_mlps(mixers, operators)
        norm, epsilon = self.norm()
        init = self.init()
        if self.problems:
            return None
        learned = settings["pos_emb"] == "learned"
        return ModelConfig(
            vocab_size=self.vocab_size(),
            width=self.width,
            **build_pattern(names, operators, mlp=mlp),
            norm=norm,
            norm_eps=epsilon,
            tie_embeddings=not settings["no_weight_tying"],
            learned_positions=settings.integer("max_position_embeddings") if learned else None,
            isolate_documents=False,
            init=init,
        )

    def mixers(self) -> list[str]:
        """Return our operators, layer by layer."""
        settings = self.settings
        layers = settings.integer("num_layers")
        listed = settings["operator_config"] or [[["global"], layers]]
        kinds: list[str] = []
        for entry in listed:
            if isinstance(entry, str):
                kinds.append(entry)
                continue
            names, times = entry
            kinds += names * (layers // len(names) if times == "all" else int(times))
        if len(kinds) != layers:
            self.problems.append(
                ConfigProblem(
                    "operator_config", f"names {len(kinds)} layers; num_layers is {layers}"
                )
            )
        for kind in dict.fromkeys(kinds):
            if kind not in MIXERS:
                self.problems.append(
                    ConfigProblem("operator_config", f"headrace has no operator for `{kind}`")
                )
        return [MIXERS[kind] for kind in kinds if kind in MIXERS]

    def attention(self) -> OperatorOptions:
        settings = self.settings
        heads = settings.integer("num_attention_heads")
        kind, rope = settings["pos_emb"], None
        if kind in ("rotary", "rotary2", "rotary_linear_scaled"):
            turned = int(self.width // heads * settings.number("rotary_pct"))
            factor = settings.number("rotary_emb_scaling_factor")
            scaled = kind == "rotary_linear_scaled" and factor != 1
            rope = Rope(
                base=settings.number("rotary_emb_base"),
                channels=turned if settings.number("rotary_pct") < 1 else None,
                scaling="linear" if scaled else "none",
                factor=factor if scaled else 1.0,
            )
        elif kind not in ("none", "learned"):
            self.refuse("pos_emb", "headrace has rotary and learned positions")
        return self.build("attention", heads=heads, rope=rope, output_bias=True)

    def se(self) -> OperatorOptions:
        settings = self.settings
        return self.build(
            "hyena-se",
            groups=self.groups("num_groups_hyena_short"),
            taps=settings.integer("hyena_se_len"),
            pregate=settings["hyena_se_pregate"],
            postgate=settings["hyena_se_postgate"],
            **self.featurizer(),
        )

    def mr(self) -> OperatorOptions:
        settings = self.settings
        key = "hyena_medium_filter_cls"
        kind = settings[key] or settings["hyena_filter_cls"]
        if kind != "explicit_single_decay":
            self.problems.append(
                ConfigProblem(key, f"{kind!r} is not expressible: MR has explicit filters")
            )
        length = min(settings.integer("hyena_mr_len"), settings.integer("seq_length"))
        return self.explicit(length, self.groups("num_groups_hyena_medium"))

    def explicit(self, taps: int, groups: int) -> OperatorOptions:
        settings = self.settings
        return self.build(
            "hyena-mr",
            groups=groups,
            taps=taps,
            decay=settings["explicit_filter_decay_preset"],
            decay_repeats=settings.integer("explicit_filter_num_decay_repeats"),
            filter_horizon=settings.integer("seq_length"),
            slow_heads=settings["use_slow_heads"],
            **self.featurizer(),
        )

    def li(self) -> OperatorOptions:
        settings, kind = self.settings, self.settings["hyena_filter_cls"]
        if kind == "explicit_single_decay":
            return self.explicit(settings.integer("seq_length"), self.groups("num_groups_hyena"))
        groups = self.groups("num_groups_hyena")
        common = {
            "groups": groups if groups != self.width else None,
            "slow_heads": settings["use_slow_heads"],
            **self.featurizer(),
        }
        size, horizon = settings.integer("hyena_filter_order"), settings.integer("seq_length")
        if kind == "implicit_modal":
            return self.build(
                "hyena-li",
                state_size=size,
                rates="product",
                gamma_min=settings.number("modal_gamma_min"),
                gamma_max=settings.number("modal_gamma_max"),
                **common,
            )
        if kind == "implicit_complex_modal":
            return self.build("hyena-li-s4d", state_size=size // 2, **common)
        if kind == "implicit_real_modal":
            return self.build(
                "hyena-li-factored",
                state_size=size,
                pole_factors=settings.integer("modal_pole_factors"),
                residue_factors=settings.integer("modal_residue_factors"),
                filter_horizon=horizon,
                **common,
            )
        if kind != "implicit_freeform":
            self.refuse("hyena_filter_cls", "headrace has modal, free-form and explicit filters")
        return self.build(
            "hyena-li-freeform",
            filter_width=size,
            filter_horizon=horizon,
            features=settings.integer("hyena_filter_emb_dim"),
            inner_layers=settings.integer("hyena_filter_num_inner_mlps"),
            frequency=settings.number("hyena_filter_w"),
            fast_decay=settings.number("hyena_filter_fast_decay"),
            slow_decay=settings.number("hyena_filter_slow_decay"),
            learned_decay=True,
            last_start="xavier",
            **common,
        )

    def add_mlps(
        self, mixers: list[str], operators: dict[str, OperatorOptions]
    ) -> tuple[list[str], str]:
        """Add the MLPs; return the layers, and their most frequent MLP.

        The first long filter that Savanna builds sets every later MLP's activation to `gating_act`:
        so Evo 2's GLUs after the first layer have no activation.
        """
        settings = self.settings
        if settings["mlp_type"] == "short_hyena":
            operators["short"] = self.short()
            return mixers, "short"
        first = next((n for n, name in enumerate(mixers) if name in ("mr", "li")), len(mixers))
        dense_activation = settings["parallel_glu_activation_default"]
        gated = settings["mlp_type"] != "regular"
        before, after = settings["activation"], settings["gating_act"]
        if gated and dense_activation is not None:
            before = after = dense_activation
        used = ([before] if first > 0 else []) + ([after] if first < len(mixers) else [])
        for activation in dict.fromkeys(used):
            operators[f"mlp-{activation}"] = self.mlp(activation, gated=gated)
        default = f"mlp-{after if first < len(mixers) else before}"
        names = [
            f"{name}/mlp-{before}" if number < first and default != f"mlp-{before}" else name
            for number, name in enumerate(mixers)
        ]
        return names, default

    def mlp(self, activation: str, *, gated: bool) -> OperatorOptions:
        if activation not in ACTIVATIONS:
            self.refuse("activation", f"headrace has {', '.join(ACTIVATIONS)}")
            activation = "gelu"
        if not gated:
            if activation == "gelu" and self.settings["bias_gelu_fusion"]:
                activation = "gelu-tanh"
            return self.build("mlp", hidden=4 * self.width, activation=activation, bias=True)
        if self.settings["mlp_type"] != "llama":
            self.refuse("mlp_type", "headrace has regular, llama and short_hyena")
        hidden = multiple(
            int(8 * self.width / 3), self.settings.integer("make_gated_mlp_multiple_of")
        )
        if self.settings["pad_mlp_weights"]:
            hidden = multiple(hidden, 16 * self.settings.integer("model_parallel_size"))
        return self.build("glu", hidden=hidden, activation=activation)

    def short(self) -> OperatorOptions:
        """Build a Hyena-SE that replaces the MLP, at its own width."""
        settings = self.settings
        expansion = settings.number("hyena_mlp_expansion_factor")
        hidden = int(self.width * expansion)
        if expansion > 1:
            hidden = multiple(hidden, OPERATOR_WIDTH)
        return self.build(
            "hyena-mlp",
            hidden=hidden,
            groups=int(self.groups("num_groups_hyena_mlp") * expansion),
            taps=int(settings["hyena_mlp_len"] or settings["hyena_se_len"]),
            featurizer=settings.integer("short_conv_L"),
            pregate=settings["hyena_mlp_pregate"],
            postgate=settings["hyena_mlp_postgate"],
            output_bias=True,
        )

    def featurizer(self) -> Mapping[str, Any]:
        return {"featurizer": self.settings.integer("short_conv_L")}

    def groups(self, key: str) -> int:
        return int(self.settings[key] or self.settings["num_groups_hyena"] or self.width)

    def norm(self) -> tuple[NormKind, float]:
        settings = self.settings
        if settings["norm"] == "layernorm":
            return "layer", settings.number("layernorm_epsilon")
        if settings["norm"] != "rmsnorm":
            self.refuse("norm", "headrace has rmsnorm and layernorm")
        kind: NormKind = "rms" if settings["use_fp8_norm"] else "rms-eps-outside"
        return kind, settings.number("rms_norm_epsilon")

    def init(self) -> InitConfig:
        settings = self.settings
        pair = settings["init_method"], settings["output_layer_init_method"]
        if pair not in INIT:
            self.refuse("init_method", f"with output_layer_init_method: {pair[1]}")
            return InitConfig()
        weights, output = INIT[pair]
        options: dict[str, Any] = {"weights": weights, "output": output}
        return InitConfig(std=settings.number("init_method_std"), **options)

    def vocab_size(self) -> int:
        settings = self.settings
        if settings["padded_vocab_size"] is not None:
            return settings.integer("padded_vocab_size")
        sizes = {"CharLevelTokenizer": BYTES, "GPT2BPETokenizer": GPT2}
        kind = settings["tokenizer_type"]
        if kind not in sizes:
            raise settings.refusal(
                ConfigProblem(
                    "tokenizer_type", f"the vocabulary of {kind} is not in the configuration"
                )
            )
        unit = settings.integer("make_vocab_size_divisible_by")
        return multiple(sizes[kind], unit * settings.integer("model_parallel_size"))

    def build(self, kind: str, **options: Any) -> OperatorOptions:
        return OPTIONS[kind](kind=kind, **options)


def multiple(number: int, unit: int) -> int:
    """Round up to a multiple."""
    return math.ceil(number / unit) * unit
