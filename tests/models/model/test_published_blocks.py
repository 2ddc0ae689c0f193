"""Blocks of published families beside transformers: norms, gates and multipliers, with random
weights. (Their norms compute in fp32.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.console.config import build
from headrace.models.config.config import ModelConfig
from headrace.models.config.options.attention import AttentionOptions
from headrace.models.config.options.rope import Rope
from headrace.models.model.model import Model
from headrace.models.operators.attention import Attention
from headrace.models.operators.base import BatchContext

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
ATTENTION = {"kind": "attention", "heads": 4, "kv_heads": 2}
GLU = {"kind": "glu", "hidden": 48}
NAMES = {
    "embed_tokens.weight": "embedding.weight",
    "norm.weight": "norm.weight",
    "self_attn.o_proj": "mixer.operator.out",
    "self_attn.q_norm": "mixer.operator.q_norm",
    "self_attn.k_norm": "mixer.operator.k_norm",
    "mlp.down_proj": "mlp.operator.down",
    "feed_forward.down_proj": "mlp.operator.down",
    "final_layernorm.weight": "norm.weight",
    "mamba.in_proj": "mixer.second.input",
    "mamba.conv1d.weight": "mixer.second.conv.taps",
    "mamba.conv1d": "mixer.second.conv",
    "mamba.out_proj": "mixer.second.output",
    "mamba": "mixer.second",
}


def theirs_of(kind: str, **settings: Any) -> Any:
    """Build a model of transformers, whose every weight matters."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **settings})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def ours_of(theirs: Any, norms: Mapping[str, str], **config: Any) -> Model:
    """Build our model with the weights of `theirs`; `norms` maps their names of a layer's norms."""
    data = {"vocab_size": 37, "width": 32, "mlp": "glu", "tie_embeddings": False, **config}
    model = Model(build(ModelConfig, data, source="a test")).double().eval()
    weights: dict[str, Tensor] = dict(theirs.state_dict())
    head = weights.pop("lm_head.weight")
    ours = {"head.weight": head}
    joined: dict[str, dict[str, Tensor]] = {}
    parts = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv"}
    parts |= {"gate_proj": "gate_up", "up_proj": "gate_up"}
    for name, weight in weights.items():
        short = name.removeprefix("model.")
        number, _, rest = short.removeprefix("layers.").partition(".")
        layer = f"blocks.{number}." if short.startswith("layers.") else ""
        rest = rest if layer else short
        words = rest.split(".")
        if len(words) > 2 and words[-2] in parts:
            branch = "mixer" if words[0] == "self_attn" else "mlp"
            target = f"{layer}{branch}.operator.{parts[words[-2]]}.weight"
            joined.setdefault(target, {})[words[-2]] = weight
            continue
        names = {**NAMES, **norms}
        their_name = next(name for name in names if rest.startswith(name))
        if weight.dim() == 3:  # the taps of a convolution, the current token's last
            weight = weight.squeeze(1).flip(-1)
        ours[layer + rest.replace(their_name, names[their_name])] = weight
    for target, tensors in joined.items():
        if tensors.keys() == {"q_proj", "k_proj", "v_proj"}:
            matrices = [tensors[part] for part in ("q_proj", "k_proj", "v_proj")]
            if len(matrices[0]) > 32:  # Qwen3-Next: a head's queries, then its gate
                q, gate = matrices[0].unflatten(0, (4, 2, -1)).unbind(1)
                matrices = [q.flatten(0, 1), *matrices[1:], gate.flatten(0, 1)]
        else:
            matrices = [tensors["gate_proj"], tensors["up_proj"]]
        ours[target] = torch.cat(matrices)
    model.load_state_dict(ours)
    return model


def max_difference(ours: Model, theirs: Any) -> float:
    ids = torch.randint(0, 37, (2, 19), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        return float((ours(ids) - expected).abs().max() / expected.abs().max())


GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 8.0,
}


def test_multipliers_are_granites() -> None:
    theirs = theirs_of("granite", **GRANITE)
    norms = {"input_layernorm": "mixer.norm", "post_attention_layernorm": "mlp.norm"}
    config: dict[str, Any] = {
        "pattern": "[attention] * 2",
        "norm_eps": theirs.config.rms_norm_eps,
        "embedding_multiplier": 3,
        "logits_multiplier": 1 / 8,
        "operators": {
            "attention": {**ATTENTION, "softmax_scale": 0.2, "output_multiplier": 0.4},
            "glu": {**GLU, "output_multiplier": 0.4},
        },
    }
    assert max_difference(ours_of(theirs, norms, **config), theirs) < 1e-6
    for key in ("embedding_multiplier", "logits_multiplier"):
        assert max_difference(ours_of(theirs, norms, **{**config, key: 1}), theirs) > 1e-3


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_olmo2_has_norms_after_its_operators_and_over_all_heads(norm: str) -> None:
    theirs = theirs_of("olmo2")
    name = "norm" if norm == "pre" else "post_norm"
    norms = {
        "post_attention_layernorm": f"mixer.{name}",
        "post_feedforward_layernorm": f"mlp.{name}",
    }
    qk_norm = {"qk_norm": True, "qk_norm_over": "projection", "qk_norm_eps": 1e-5}
    ours = ours_of(
        theirs,
        norms,
        pattern="[attention] * 2",
        norm_eps=theirs.config.rms_norm_eps,
        operators={
            "attention": {**ATTENTION, **qk_norm, "norm_placement": norm},
            "glu": {**GLU, "norm_placement": norm},
        },
    )
    assert (max_difference(ours, theirs) < 1e-6) == (norm == "post")


@pytest.mark.parametrize("norm", ["rms-zero-centered", "rms"])
def test_qwen3_next_gates_attention_and_centers_the_weights_of_norms(norm: str) -> None:
    theirs = theirs_of(
        "qwen3_next",
        layer_types=["full_attention"] * 2,
        head_dim=8,
        mlp_only_layers=[0, 1],
        rope_parameters={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    )
    attention = {
        **ATTENTION,
        "rope": {"base": 50, "channels": 4},
        "qk_norm": True,
        "qk_norm_kind": norm,
        "output_gate": True,
    }
    ours = ours_of(
        theirs,
        {"input_layernorm": "mixer.norm", "post_attention_layernorm": "mlp.norm"},
        pattern="[attention] * 2",
        norm=norm,
        norm_eps=1e-6,
        operators={"attention": attention, "glu": GLU},
    )
    assert (max_difference(ours, theirs) < 1e-6) == (norm == "rms-zero-centered")


FALCON = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.5, 2.0, 3.0, 0.7, 1.5],
    "mlp_multipliers": [1.5, 0.4],
}


@pytest.mark.parametrize("pattern", ["[attention|mamba] * 2", "[attention/none, mamba] * 2"])
def test_falcon_h1_has_attention_and_mamba_side_by_side(pattern: str) -> None:
    theirs = theirs_of(
        "falcon_h1",
        **FALCON,
        head_dim=8,
        mamba_d_ssm=48,
        mamba_n_heads=6,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_n_groups=2,
        mamba_chunk_size=8,
        mamba_rms_norm=False,
    )
    operators: dict[str, Any] = {
        "attention": {
            **ATTENTION,
            "rope": {"base": theirs.config.rope_parameters["rope_theta"]},
            "softmax_scale": 0.6 * 8**-0.5,
            "input_multiplier": 1.5,
            "output_multiplier": 0.8,
        },
        "mamba": {
            "kind": "mamba2",
            "heads": 6,
            "head_dim": 8,
            "state_size": 4,
            "groups": 2,
            "chunk": 8,
            "gated_norm": False,
            "input_multiplier": 1.25,
            "output_multiplier": 0.7,
            "projection_multipliers": FALCON["ssm_multipliers"],
        },
        "glu": {**GLU, "gate_multiplier": 1.5, "output_multiplier": 0.4},
    }
    config = {
        "operators": operators,
        "norm_eps": theirs.config.rms_norm_eps,
        "embedding_multiplier": 3,
        "logits_multiplier": 0.5,
    }
    norms = {"input_layernorm": "mixer.norm", "pre_ff_layernorm": "mlp.norm"}
    ours = ours_of(theirs, norms, pattern="[attention|mamba] * 2", **config)
    if "|" in pattern:
        assert max_difference(ours, theirs) < 1e-6
        return
    sequence = Model(replace(ours.config, pattern=pattern)).double().eval()  # negative control
    weights = ours.state_dict()
    for number in range(2):
        for name, weight in ours.blocks[str(number)].state_dict().items():
            mamba = name.replace("mixer.second", "mixer.operator")
            place = 2 * number + (name.startswith(("mlp", "mixer.second")))
            weights[f"blocks.{place}.{mamba}"] = weight
            if name == "mixer.norm.weight":
                weights[f"blocks.{place + 1}.{name}"] = weight
    sequence_keys = sequence.state_dict().keys()
    sequence.load_state_dict({name: weights[name] for name in sequence_keys})
    assert max_difference(sequence, theirs) > 1e-3


@pytest.mark.parametrize("sinks", [True, False])
def test_gpt_oss_counts_a_sink_in_each_softmax(sinks: bool) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

    torch.manual_seed(4)
    rope = {"rope_type": "default", "rope_theta": 50.0}
    config = transformers.GptOssConfig(
        **SIZES, head_dim=8, rope_parameters=rope, layer_types=["full_attention"] * 2
    )
    config._attn_implementation = "eager"
    theirs = GptOssAttention(config, 0).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 19, 32, dtype=torch.float64)
    positions = torch.arange(19)[None]
    hidden = torch.full((19, 19), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected, _ = theirs(x, GptOssRotaryEmbedding(config)(x, positions), hidden)
    options = AttentionOptions(
        heads=4,
        kv_heads=2,
        rope=Rope(base=50),
        qkv_bias=True,
        output_bias=True,
        sinks=sinks,
    )
    ours = Attention(options, 32).double()
    projections = (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    weights = {
        "qkv.weight": torch.cat([projection.weight for projection in projections]),
        "qkv.bias": torch.cat([projection.bias for projection in projections]),
        "out.weight": theirs.o_proj.weight,
        "out.bias": theirs.o_proj.bias,
    }
    ours.load_state_dict({**weights, "sinks": theirs.sinks} if sinks else weights)
    difference = (ours(x, BatchContext(positions)) - expected).abs().max()
    assert (difference < 1e-6) == sinks


def test_a_multiplier_of_zero_silences_any_operator(tiny_operator: Model) -> None:
    config = tiny_operator.config
    silent = {name: replace(o, output_multiplier=0.0) for name, o in config.operators.items()}
    model = Model(replace(config, operators=silent)).double().eval()
    model.load_state_dict(tiny_operator.state_dict())
    ids = torch.randint(0, config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        u = model.embedding.weight[ids] * config.embedding_multiplier
        assert torch.equal(model(ids), model.logits(model.norm(u)))
        assert not torch.equal(model(ids), tiny_operator(ids))
