"""Bamba: Mamba-2 or attention, then a SwiGLU; rotary positions on half a head's channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config.options.attention import AttentionOptions
from ..config.options.mlp import GLUOptions
from .decoder import Decoder, Part
from .family import Settings
from .keys import Key, Rotary, flag
from .llama import ATTENTION, GLU_NAMES, HEAD_DIM, MIXER_NORM, kv_heads
from .mamba import mamba2_part


class AttentionPlaces:
    """Layers of Mamba-2, and the numbers of those of attention."""

    def read(self, settings: Mapping[str, Any]) -> Sequence[str]:
        places = settings["attn_layer_indices"] or []
        numbers = range(settings["num_hidden_layers"])
        return ["attention/glu" if number in places else "mamba/glu" for number in numbers]

    def write(self, layers: Sequence[str]) -> Settings:
        places = [number for number, layer in enumerate(layers) if layer == "attention/glu"]
        return {"num_hidden_layers": len(layers), "attn_layer_indices": places}


BAMBA = Decoder(
    model_type="bamba",
    architecture="BambaForCausalLM",
    models="9B",
    parts={
        "mamba": mamba2_part({"expand": "mamba_expand", "bias": "mamba_proj_bias"}),
        "attention": Part(
            options=AttentionOptions,
            module="self_attn",
            norms=MIXER_NORM,
            names=ATTENTION,
            fields={
                "heads": "num_attention_heads",
                "kv_heads": kv_heads(8),
                "head_dim": HEAD_DIM,
                "rope": Rotary(rotated=0.5),
            },
        ),
        "glu": Part(
            options=GLUOptions,
            module="feed_forward",
            norms={"norm": "pre_ff_layernorm"},
            names=GLU_NAMES,
            fields={"hidden": "intermediate_size"},
        ),
    },
    layers=AttentionPlaces(),
    fields={
        "vocab_size": "vocab_size",
        "width": "hidden_size",
        "norm_eps": Key("rms_norm_eps"),
        "tie_embeddings": flag("tie_word_embeddings", False),
    },
    ends={"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
    expected={"hidden_act": "silu", "mamba_conv_bias": True},
    refused={"attention_bias": False, "mlp_bias": False},
    written={"mamba_chunk_size": 256},
    need="transformers counts the tokens of a Bamba's cache in an attention layer, and checks the "
    "sizes of Mamba layers",
)
