"""LFM2: gated short convolutions or attention, then a SwiGLU.

A convolution layer is C ⊙ (h ∗ (B ⊙ x)) with a filter for each channel: our `hyena-mlp` with
k = B, q = C, v = x and as many groups as channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.options.attention import AttentionOptions
from ..config.options.hyena_mlp import HyenaMLPOptions
from ..config.options.mlp import GLUOptions
from .decoder import Decoder, Part
from .keys import Computed, Key, LayerTypes, Rotary, flag, implied
from .llama import HEAD_DIM, kv_heads
from .names import Names, swapped_rows, taps


def read_hidden(settings: Mapping[str, Any]) -> int:
    """Return the width of the MLPs: two thirds of the key's, multiplied and rounded up."""
    hidden = int(settings.get("block_ff_dim") or settings["intermediate_size"])
    if not settings.get("block_auto_adjust_ff_dim", True):
        return hidden
    multiplier = settings.get("block_ffn_dim_multiplier", 1.0)
    hidden = int(2 * hidden / 3)
    if multiplier is None:
        return hidden
    multiple = int(settings.get("block_multiple_of", 256))
    return -(-int(multiplier * hidden) // multiple) * multiple


def derive_layer_types(settings: Mapping[str, Any]) -> list[str]:
    numbers = range(settings["num_hidden_layers"])
    attention = settings.get("full_attn_idxs")
    return [
        "full_attention" if attention is None or number in attention else "conv"
        for number in numbers
    ]


MIXER_NORM: Names = {"norm": "operator_norm"}
WIDTH = implied(lambda settings: settings["hidden_size"])

LFM2 = Decoder(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    models="350M, 700M, 1.2B, 2.6B",
    parts={
        "conv": Part(
            options=HyenaMLPOptions,
            module="conv",
            norms=MIXER_NORM,
            names={"qkv": swapped_rows("in_proj"), "taps": taps("conv.weight"), "down": "out_proj"},
            fields={"taps": Key("conv_L_cache", 3), "hidden": WIDTH, "groups": WIDTH},
            optional=True,
        ),
        "attention": Part(
            options=AttentionOptions,
            module="self_attn",
            norms=MIXER_NORM,
            names={
                "qkv": ("q_proj", "k_proj", "v_proj"),
                "out": "out_proj",
                "q_norm": "q_layernorm",
                "k_norm": "k_layernorm",
            },
            fields={
                "heads": "num_attention_heads",
                "kv_heads": kv_heads(8),
                "head_dim": HEAD_DIM,
                "rope": Rotary(base=1e6),
                "qk_norm_eps": Key("norm_eps", 1e-5),
            },
            fixed={"qk_norm": True},
            optional=True,
        ),
        "glu": Part(
            options=GLUOptions,
            module="feed_forward",
            norms={"norm": "ffn_norm"},
            names={"gate_up": ("w1", "w3"), "down": "w2"},
            fields={
                "hidden": Computed(
                    read_hidden,
                    lambda value, options, width: {
                        "intermediate_size": value,
                        "block_auto_adjust_ff_dim": False,
                    },
                )
            },
        ),
    },
    layers=LayerTypes({"conv": "conv/glu", "full_attention": "attention/glu"}, derive_layer_types),
    fields={
        "vocab_size": "vocab_size",
        "width": "hidden_size",
        "norm_eps": Key("norm_eps", 1e-5),
        "tie_embeddings": flag("tie_word_embeddings", True, older=("tie_embedding",)),
    },
    ends={"embedding": "model.embed_tokens", "norm": "model.embedding_norm", "head": "lm_head"},
    expected={"conv_bias": False},
    refused={"use_pos_enc": True, "block_use_swiglu": True},
)
