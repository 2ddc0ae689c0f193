"""GPT-2: layer norms, learned positions, and transposed matrices."""

from __future__ import annotations

from ..config.options.attention import AttentionOptions
from ..config.options.init import InitConfig
from ..config.options.mlp import MLPOptions
from .decoder import Decoder, Part
from .keys import Computed, EqualLayers, Key, flag
from .names import transposed

GPT2 = Decoder(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    models="124M to 1.5B",
    parts={
        "attention": Part(
            options=AttentionOptions,
            module="attn",
            norms={"norm": "ln_1"},
            names={"qkv": transposed("c_attn"), "out": transposed("c_proj")},
            fields={"heads": "n_head"},
            fixed={"rope": None, "qkv_bias": True, "output_bias": True},
        ),
        "mlp": Part(
            options=MLPOptions,
            module="mlp",
            norms={"norm": "ln_2"},
            names={"up": transposed("c_fc"), "down": transposed("c_proj")},
            fields={
                "hidden": Computed(
                    lambda settings: settings.get("n_inner") or 4 * settings["n_embd"],
                    lambda value, options, width: {"n_inner": value},
                )
            },
            fixed={"bias": True},
        ),
    },
    layers=EqualLayers("attention/mlp", count="n_layer"),
    fields={
        "vocab_size": "vocab_size",
        "width": "n_embd",
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "learned_positions": "n_positions",
        "tie_embeddings": flag("tie_word_embeddings", True),
    },
    fixed={"norm": "layer", "init": InitConfig(output="depth")},
    ends={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    blocks="transformer.h",
    expected={"activation_function": "gelu_new"},
    refused={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
)
