"""GPT-2: layer norms, learned positions, and transposed matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.config import ModelConfig
from ..config.options.attention import AttentionOptions
from ..config.options.init import InitConfig
from ..config.options.mlp import MLPOptions
from .family import (
    Settings,
    expect,
    require,
    require_equal_layers,
    require_norm,
    require_sequential,
)
from .rules import Rule, map_same, map_transposed


class GPT2Family:
    architecture = "GPT2LMHeadModel"

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        expect(
            settings,
            activation_function="gelu_new",
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            add_cross_attention=False,
        )
        width = settings["n_embd"]
        attention = AttentionOptions(
            heads=settings["n_head"], rope=None, qkv_bias=True, output_bias=True
        )
        hidden = settings.get("n_inner") or 4 * width
        return ModelConfig(
            vocab_size=settings["vocab_size"],
            width=width,
            pattern=f"[attention] * {settings['n_layer']}",
            mlp="mlp",
            operators={"attention": attention, "mlp": MLPOptions(hidden=hidden, bias=True)},
            norm="layer",
            norm_eps=settings.get("layer_norm_epsilon", 1e-5),
            learned_positions=settings["n_positions"],
            tie_embeddings=bool(settings.get("tie_word_embeddings", True)),
            init=InitConfig(output="depth"),
        )

    def write(self, config: ModelConfig) -> Settings:
        require_equal_layers(config, AttentionOptions, MLPOptions)
        attention = config.operators[config.layers[0].mixer]
        mlp = config.operators[config.layers[0].mlp or ""]
        assert isinstance(attention, AttentionOptions) and isinstance(mlp, MLPOptions)
        require_norm(config, "layer")
        require_sequential(config)
        require(config.learned_positions is not None, "it has no learned positions")
        plain = AttentionOptions(heads=attention.heads, rope=None, qkv_bias=True, output_bias=True)
        require(attention == plain, "its attention is not full attention with biases")
        require(mlp.activation == "gelu-tanh" and mlp.bias, "its MLP is not a GELU MLP with biases")
        return {
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_embd": config.width,
            "n_layer": len(config.layers),
            "n_head": attention.heads,
            "n_inner": mlp.hidden,
            "n_positions": config.learned_positions,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
        }

    def rules(self, config: ModelConfig) -> list[Rule]:
        result = [
            map_same("embedding.weight", "transformer.wte.weight"),
            map_same("positions.weight", "transformer.wpe.weight"),
            map_same("norm.weight", "transformer.ln_f.weight"),
            map_same("norm.bias", "transformer.ln_f.bias"),
        ]
        if not config.tie_embeddings:
            result.append(map_same("head.weight", "lm_head.weight"))
        for number in range(len(config.layers)):
            ours, theirs = f"blocks.{number}", f"transformer.h.{number}"
            for our_name, their_name in (("mixer", "ln_1"), ("mlp", "ln_2")):
                result += [
                    map_same(f"{ours}.{our_name}.norm.{kind}", f"{theirs}.{their_name}.{kind}")
                    for kind in ("weight", "bias")
                ]
            for our_name, their_name in (
                ("mixer.operator.qkv", "attn.c_attn"),
                ("mixer.operator.out", "attn.c_proj"),
                ("mlp.operator.up", "mlp.c_fc"),
                ("mlp.operator.down", "mlp.c_proj"),
            ):
                result.append(
                    map_transposed(f"{ours}.{our_name}.weight", f"{theirs}.{their_name}.weight")
                )
                result.append(map_same(f"{ours}.{our_name}.bias", f"{theirs}.{their_name}.bias"))
        return result
