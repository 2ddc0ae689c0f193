"""StripedHyena 2 in Vortex's `config.yml`.

Layers are listed by kind, all layers in a kind have the same widths, and one switch,
`evo2_style_activations`, replaces every activation but the first layer's by the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.config import ModelConfig
from ..config.options.attention import AttentionOptions
from ..config.options.base import OperatorOptions
from ..config.options.hyena_li import HyenaLIOptions
from ..config.options.hyena_mr import HyenaMROptions
from ..config.options.hyena_se import HyenaSEOptions
from ..config.options.init import InitConfig
from ..config.options.mlp import GLUOptions
from ..config.options.rope import Rope
from .family import Settings, build_pattern, expect, require, require_norm, require_sequential

LAYER_KINDS = {"hcs": "se", "hcm": "mr", "hcl": "li", "attn": "attention"}
"""Vortex's names for layer kinds, and ours."""


def read_config(settings: Mapping[str, Any]) -> ModelConfig:
    expect(
        settings,
        column_split_hyena=False,
        hyena_flip_x1x2=False,
        interleave=True,
        column_split=True,
        proj_groups=1,
        final_norm=True,
        short_filter_bias=False,
    )
    width, groups = settings["hidden_size"], settings["hcm_filter_groups"]
    interpolated = settings.get("use_interpolated_rotary_pos_emb", False)
    factor = float(settings.get("rotary_emb_scaling_factor", 1.0)) if interpolated else 1.0
    rope = Rope(
        base=float(settings["rotary_emb_base"]),
        scaling="linear" if factor != 1 else "none",
        factor=factor,
    )
    common: dict[str, Any] = {
        "featurizer": settings["short_filter_length"],
        "qkv_bias": settings["qkv_proj_bias"],
        "output_bias": settings["hyena_out_proj_bias"],
    }
    operators: dict[str, OperatorOptions] = {
        "se": HyenaSEOptions(
            groups=settings["hcs_filter_groups"], taps=settings["hcs_filter_length"], **common
        ),
        "mr": HyenaMROptions(
            groups=groups,
            taps=settings["hcm_filter_length"],
            decay="none",
            filter_horizon=int(settings["max_seqlen"] / factor),
            **common,
        ),
        "li": HyenaLIOptions(state_size=settings["state_size"], rates="plain", **common),
        "attention": AttentionOptions(
            heads=settings["num_attention_heads"],
            rope=rope,
            qkv_bias=settings["qkv_proj_bias"],
            output_bias=settings["mha_out_proj_bias"],
        ),
        "glu": GLUOptions(hidden=settings["inner_mlp_size"], activation=settings["mlp_activation"]),
    }
    names = list_layer_names(settings)
    if settings.get("evo2_style_activations", False):
        operators["identity"] = GLUOptions(hidden=settings["inner_mlp_size"], activation="identity")
        names = [names[0] + "/glu", *names[1:]]
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        width=width,
        **build_pattern(names, operators, mlp="identity" if "identity" in operators else "glu"),
        norm="rms" if settings.get("use_flash_rmsnorm") else "rms-eps-outside",
        norm_eps=float(settings["eps"]),
        tie_embeddings=settings["tie_embeddings"],
        init=InitConfig(weights="small", output="wang"),
    )


def list_layer_names(settings: Mapping[str, Any]) -> list[str]:
    names = {
        int(number): our_name
        for vortex_name, our_name in LAYER_KINDS.items()
        for number in settings.get(f"{vortex_name}_layer_idxs") or ()
    }
    num_layers = settings["num_layers"]
    missing = [number for number in range(num_layers) if number not in names]
    if missing or len(names) != num_layers:
        raise ValueError(f"layers without a kind: {missing}; layers listed: {sorted(names)}")
    return [names[number] for number in range(num_layers)]


def write_config(config: ModelConfig) -> Settings:
    fused = config.norm == "rms"  # the fused norm has eps inside the root
    require_norm(config, "rms" if fused else "rms-eps-outside")
    require_sequential(config)
    require(config.learned_positions is None, "it has learned positions")
    options_by_type: dict[type[OperatorOptions], Any] = {}
    layers_by_kind: dict[str, list[int]] = {name: [] for name in LAYER_KINDS}
    vortex_kinds = {
        HyenaSEOptions: "hcs",
        HyenaMROptions: "hcm",
        HyenaLIOptions: "hcl",
        AttentionOptions: "attn",
    }
    activations, hidden = [], set()
    for number, layer in enumerate(config.layers):
        options = config.operators[layer.mixer]
        require(type(options) in vortex_kinds, f"layer {number} is of kind {options.kind}")
        require(layer.shared is None, "it has shared blocks")
        first = options_by_type.setdefault(type(options), options)
        require(first == options, f"`{layer.mixer}` differs from another {options.kind}")
        layers_by_kind[vortex_kinds[type(options)]].append(number)
        glu = config.operators[layer.mlp] if layer.mlp else None
        require(isinstance(glu, GLUOptions) and not glu.bias, f"layer {number} has no plain GLU")
        assert isinstance(glu, GLUOptions)
        activations.append(glu.activation)
        hidden.add(glu.hidden)
    require(len(hidden) == 1, "its MLPs differ in width")
    for kind, name in vortex_kinds.items():
        require(kind in options_by_type, f"it has no layer of Vortex's kind {name}")
    se, mr, li, attention = (options_by_type[kind] for kind in vortex_kinds)
    for hyena in (se, mr, li):
        require(not hyena.featurizer_bias, "its short filters have biases")
        require(hyena.qkv_bias == attention.qkv_bias, "only some of its projections have biases")
        require(hyena.output_bias == li.output_bias, "only some of its outputs have biases")
        require(hyena.featurizer == li.featurizer, "its short filters differ in length")
    # From 128 taps on, Vortex treats a filter as MR, which has a skip.
    require(mr.taps >= 128 > se.taps, "Vortex's MR filters have 128 taps or more, SE's less")
    require(li.poles == "real", "its poles are complex")
    require(li.filters(config.width) == config.width, "its long filters are shared by channels")
    require(not (mr.slow_heads or li.slow_heads), "it has slow heads")
    require(attention.kv_heads in (None, attention.heads), "its attention shares keys among heads")
    require(attention.head_dim is None, "heads × head_dim is not the width")
    require(attention.window is None and not attention.qk_norm, "its attention has options")
    rope = attention.rope
    require(rope is not None and rope.channels is None, "RoPE is not on all channels")
    require(rope is not None and rope.scaling in ("none", "linear"), "its RoPE has another scaling")
    first, later_activations = activations[0], set(activations[1:])
    require(first in ("gelu", "silu"), f"the first activation is {first}")
    require(
        later_activations in ({"identity"}, {first}, set()),
        f"activations after the first: {sorted(later_activations)}",
    )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_filters": config.width,
        **{f"{name}_layer_idxs": numbers for name, numbers in layers_by_kind.items()},
        "hcs_filter_length": se.taps,
        "hcs_filter_groups": se.groups,
        "hcm_filter_length": mr.taps,
        "hcm_filter_groups": mr.groups,
        "hcl_filter_groups": config.width,
        "num_layers": len(config.layers),
        "short_filter_length": li.featurizer,
        "short_filter_bias": False,
        "num_attention_heads": attention.heads,
        "eps": config.norm_eps,
        "state_size": li.state_size,
        "rotary_emb_base": rope.base,
        "use_interpolated_rotary_pos_emb": rope.scaling == "linear",
        "rotary_emb_scaling_factor": rope.factor,
        "inner_mlp_size": hidden.pop(),
        "mlp_activation": first,
        "evo2_style_activations": later_activations == {"identity"},
        "tie_embeddings": config.tie_embeddings,
        "qkv_proj_bias": attention.qkv_bias,
        "mha_out_proj_bias": attention.output_bias,
        "hyena_out_proj_bias": li.output_bias,
        "hyena_filter_groups": 1,
        "proj_groups": 1,
        "model_parallel_size": 1,
        "pipe_parallel_size": 1,
        "column_split": True,
        "column_split_hyena": False,
        "interleave": True,
        "hyena_flip_x1x2": False,
        "final_norm": True,
        "max_seqlen": int(mr.filter_horizon * rope.factor),
        "max_batch_size": 1,
        "tokenizer_type": "CharLevelTokenizer",
        "use_flash_attn": True,
        "use_flash_rmsnorm": fused,
        "use_flash_depthwise": False,
        "use_flashfft": False,
        "use_fp8_input_projections": False,
        "prefill_style": "fft",
        "inference_mode": True,
    }
