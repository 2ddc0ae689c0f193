"""Llama and Mixtral: attention, then a SwiGLU or SwiGLU experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config.config import ModelConfig
from ..config.options.attention import AttentionOptions
from ..config.options.base import OperatorOptions
from ..config.options.mlp import GLUOptions
from ..config.options.moe import MoEOptions
from .family import (
    Settings,
    expect,
    get_plain_attention,
    read_rope,
    require,
    require_equal_layers,
    require_plain_decoder,
    write_rope,
)
from .rules import Rule, map_ends, map_rows, map_same, map_stacked


class LlamaFamily:
    architecture = "LlamaForCausalLM"

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        expect(settings, hidden_act="silu", mlp_bias=False, pretraining_tp=1)
        glu = GLUOptions(hidden=settings["intermediate_size"])
        bias = bool(settings.get("attention_bias"))
        return read_decoder(settings, "glu", glu, bias=bias, window=None)

    def write(self, config: ModelConfig) -> Settings:
        require_equal_layers(config, AttentionOptions, GLUOptions)
        options = get_plain_attention(config)
        glu = config.operators[config.layers[0].mlp or ""]
        assert isinstance(glu, GLUOptions)
        require(glu.activation == "silu" and not glu.bias, "its MLP is not a SwiGLU without biases")
        require(options.window is None, "its attention has a window")
        require(
            options.qkv_bias == options.output_bias,
            "only some of its attention has biases",
        )
        return {
            **write_decoder(config, options),
            "model_type": "llama",
            "hidden_act": "silu",
            "intermediate_size": glu.hidden,
            "attention_bias": options.qkv_bias,
            "mlp_bias": False,
        }

    def rules(self, config: ModelConfig) -> list[Rule]:
        result = decoder_rules(config)
        for number, layer in enumerate(config.layers):
            glu = config.operators[layer.mlp or ""]
            assert isinstance(glu, GLUOptions)
            result += glu_rules(
                f"blocks.{number}.mlp.operator", f"model.layers.{number}.mlp", glu.hidden
            )
        return result


class MixtralFamily:
    architecture = "MixtralForCausalLM"

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        expect(settings, hidden_act="silu", router_jitter_noise=0.0)
        top_k = settings["num_experts_per_tok"]
        moe = MoEOptions(
            experts=settings["num_local_experts"],
            top_k=top_k,
            normalize=True if top_k == 1 else None,
            hidden=settings["intermediate_size"],
            balance_loss=settings.get("router_aux_loss_coef") or 0.0,
        )
        return read_decoder(settings, "moe", moe, bias=False, window=settings.get("sliding_window"))

    def write(self, config: ModelConfig) -> Settings:
        require_equal_layers(config, AttentionOptions, MoEOptions)
        options = get_plain_attention(config)
        moe = config.operators[config.layers[0].mlp or ""]
        assert isinstance(moe, MoEOptions)
        require(moe.router == "softmax" and not moe.sinkhorn, "its router is not softmax")
        require(moe.normalizes, "its router does not scale the weights to sum to one")
        require(moe.activation == "silu", "its experts are not SwiGLUs")
        require(not options.qkv_bias and not options.output_bias, "its attention has biases")
        return {
            **write_decoder(config, options),
            "model_type": "mixtral",
            "hidden_act": "silu",
            "intermediate_size": moe.hidden,
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "router_aux_loss_coef": moe.balance_loss,
            "sliding_window": options.window,
        }

    def rules(self, config: ModelConfig) -> list[Rule]:
        result = decoder_rules(config)
        for number, layer in enumerate(config.layers):
            moe = config.operators[layer.mlp or ""]
            assert isinstance(moe, MoEOptions)
            ours = f"blocks.{number}.mlp.operator"
            theirs = f"model.layers.{number}.block_sparse_moe"
            experts = [f"{theirs}.experts.{expert}" for expert in range(moe.experts)]
            result.append(map_same(f"{ours}.router.weight", f"{theirs}.gate.weight"))
            gate_up = tuple(
                f"{expert}.{name}.weight" for expert in experts for name in ("w1", "w3")
            )
            result.append(Rule(f"{ours}.gate_up", gate_up, split_experts, join_experts))
            down = [f"{expert}.w2.weight" for expert in experts]
            result.append(map_stacked(f"{ours}.down", down))
        return result


def split_experts(gate_up: Tensor) -> list[Tensor]:
    """Split [experts, 2·hidden, width] into each expert's gate and up matrices."""
    return [matrix for expert in gate_up.unbind(0) for matrix in expert.chunk(2)]


def join_experts(matrices: Any) -> Tensor:
    pairs = zip(matrices[::2], matrices[1::2], strict=True)
    return torch.stack([torch.cat(pair) for pair in pairs])


def read_decoder(
    settings: Mapping[str, Any], name: str, mlp: OperatorOptions, *, bias: bool, window: int | None
) -> ModelConfig:
    heads = settings["num_attention_heads"]
    width = settings["hidden_size"]
    head_dim = settings.get("head_dim")
    attention = AttentionOptions(
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rope=read_rope(settings),
        window=window,
        qkv_bias=bias,
        output_bias=bias,
    )
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        width=width,
        pattern=f"[attention] * {settings['num_hidden_layers']}",
        mlp=name,
        operators={"attention": attention, name: mlp},
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(settings.get("tie_word_embeddings", False)),
    )


def write_decoder(config: ModelConfig, options: AttentionOptions) -> Settings:
    require_plain_decoder(config)
    assert options.rope is not None
    head_dim = options.dim(config.width)
    return {
        **write_rope(options.rope, head_dim),
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads or options.heads,
        "head_dim": options.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def decoder_rules(config: ModelConfig) -> list[Rule]:
    result = map_ends(config, "model.embed_tokens.weight", "model.norm.weight")
    for number, layer in enumerate(config.layers):
        options = config.operators[layer.mixer]
        assert isinstance(options, AttentionOptions)
        ours, theirs = f"blocks.{number}", f"model.layers.{number}"
        result.append(map_same(f"{ours}.mixer.norm.weight", f"{theirs}.input_layernorm.weight"))
        result.append(
            map_same(f"{ours}.mlp.norm.weight", f"{theirs}.post_attention_layernorm.weight")
        )
        result += attention_rules(
            f"{ours}.mixer.operator", f"{theirs}.self_attn", options, config.width
        )
    return result


def glu_rules(ours: str, theirs: str, hidden: int) -> list[Rule]:
    gate_up = {f"{theirs}.{name}_proj.weight": hidden for name in ("gate", "up")}
    return [
        map_rows(f"{ours}.gate_up.weight", gate_up),
        map_same(f"{ours}.down.weight", f"{theirs}.down_proj.weight"),
    ]


def attention_rules(ours: str, theirs: str, options: AttentionOptions, width: int) -> list[Rule]:
    dim = options.dim(width)
    sizes = {"q": dim * options.heads}
    sizes["k"] = sizes["v"] = dim * (options.kv_heads or options.heads)
    result = []
    for kind, present in (("weight", True), ("bias", options.qkv_bias)):
        if present:
            row_counts = {f"{theirs}.{name}_proj.{kind}": size for name, size in sizes.items()}
            result.append(map_rows(f"{ours}.qkv.{kind}", row_counts))
    result.append(map_same(f"{ours}.out.weight", f"{theirs}.o_proj.weight"))
    if options.output_bias:
        result.append(map_same(f"{ours}.out.bias", f"{theirs}.o_proj.bias"))
    return result
