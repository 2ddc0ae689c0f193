"""Bamba: Mamba-2 or attention, then a SwiGLU; rotary positions on half a head's channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config.config import ModelConfig
from ..config.options.attention import AttentionOptions
from ..config.options.base import OperatorOptions
from ..config.options.mamba2 import Mamba2Options
from ..config.options.mlp import GLUOptions
from .family import (
    Settings,
    build_pattern,
    expect,
    read_rope,
    require,
    require_plain_decoder,
    write_rope,
)
from .llama import attention_rules, glu_rules
from .mamba import mamba2_rules
from .rules import Rule, map_ends, map_same


class BambaFamily:
    architecture = "BambaForCausalLM"

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        expect(
            settings,
            hidden_act="silu",
            mamba_conv_bias=True,
            attention_bias=False,
            mlp_bias=False,
        )
        width, heads = settings["hidden_size"], settings["num_attention_heads"]
        head_dim = width // heads
        rope = read_rope(settings, rotated=0.5)
        operators: dict[str, OperatorOptions] = {
            "mamba": Mamba2Options(
                state_size=settings["mamba_d_state"],
                head_dim=settings["mamba_expand"] * width // settings["mamba_n_heads"],
                groups=settings["mamba_n_groups"],
                norm_groups=1,
                expand=settings["mamba_expand"],
                conv=settings["mamba_d_conv"],
                norm_eps=settings["rms_norm_eps"],
                bias=settings["mamba_proj_bias"],
            ),
            "attention": AttentionOptions(
                heads=heads,
                kv_heads=settings["num_key_value_heads"],
                rope=dataclasses.replace(rope, channels=head_dim // 2),
            ),
            "glu": GLUOptions(hidden=settings["intermediate_size"]),
        }
        places = settings["attn_layer_indices"] or []
        names = [
            "attention" if number in places else "mamba"
            for number in range(settings["num_hidden_layers"])
        ]
        return ModelConfig(
            vocab_size=settings["vocab_size"],
            width=width,
            **build_pattern(names, operators, mlp="glu"),
            norm_eps=settings["rms_norm_eps"],
            tie_embeddings=bool(settings.get("tie_word_embeddings", False)),
        )

    def write(self, config: ModelConfig) -> Settings:
        require_plain_decoder(config)
        kinds = {type(config.operators[layer.mixer]) for layer in config.layers}
        require(kinds == {Mamba2Options, AttentionOptions}, "it is not Mamba-2 and attention")
        mixers = {layer.mixer for layer in config.layers}
        require(len(mixers) == 2, "it has several options of Mamba-2 or attention")
        mamba, attention = (
            next(config.operators[name] for name in mixers if type(config.operators[name]) is kind)
            for kind in (Mamba2Options, AttentionOptions)
        )
        assert isinstance(mamba, Mamba2Options) and isinstance(attention, AttentionOptions)
        names = {layer.mlp for layer in config.layers}
        glu = config.operators[names.pop() or ""] if None not in names else None
        require(not names and isinstance(glu, GLUOptions), "its MLPs differ")
        assert isinstance(glu, GLUOptions)
        require(glu == GLUOptions(hidden=glu.hidden), "its MLP is not a SwiGLU without biases")
        require(all(layer.shared is None for layer in config.layers), "it has shared blocks")
        require((mamba.norm_groups or mamba.groups) == 1, "its gated norm has groups")
        require(mamba.norm_eps == config.norm_eps, "its norms have different eps")
        dim = attention.dim(config.width)
        rope = attention.rope
        require(dim * attention.heads == config.width, "heads × head_dim is not the width")
        require(
            rope is not None and rope.channels == dim // 2,
            "RoPE is not on half of the channels",
        )
        plain = AttentionOptions(heads=attention.heads, kv_heads=attention.kv_heads, rope=rope)
        require(
            dataclasses.replace(attention, head_dim=None) == plain,
            "its attention has options",
        )
        assert rope is not None
        return {
            **write_rope(rope, dim // 2),
            "model_type": "bamba",
            "vocab_size": config.vocab_size,
            "hidden_size": config.width,
            "intermediate_size": glu.hidden,
            "num_hidden_layers": len(config.layers),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.kv_heads or attention.heads,
            "attn_layer_indices": [
                number
                for number, layer in enumerate(config.layers)
                if config.operators[layer.mixer] is attention
            ],
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            "mamba_n_heads": mamba.expand * config.width // mamba.head_dim,
            "mamba_d_head": mamba.head_dim,
            "mamba_n_groups": mamba.groups,
            "mamba_d_state": mamba.state_size,
            "mamba_d_conv": mamba.conv,
            "mamba_expand": mamba.expand,
            "mamba_chunk_size": 256,
            "mamba_conv_bias": True,
            "mamba_proj_bias": mamba.bias,
        }

    def rules(self, config: ModelConfig) -> list[Rule]:
        result = map_ends(config, "model.embed_tokens.weight", "model.final_layernorm.weight")
        for number, layer in enumerate(config.layers):
            ours, theirs = f"blocks.{number}", f"model.layers.{number}"
            glu = config.operators[layer.mlp or ""]
            assert isinstance(glu, GLUOptions)
            result += [
                map_same(f"{ours}.mixer.norm.weight", f"{theirs}.input_layernorm.weight"),
                map_same(f"{ours}.mlp.norm.weight", f"{theirs}.pre_ff_layernorm.weight"),
                *glu_rules(f"{ours}.mlp.operator", f"{theirs}.feed_forward", glu.hidden),
            ]
            options, ours = config.operators[layer.mixer], f"{ours}.mixer.operator"
            if isinstance(options, AttentionOptions):
                result += attention_rules(ours, f"{theirs}.self_attn", options, config.width)
            else:
                result += mamba2_rules(ours, f"{theirs}.mamba", options)
        return result
