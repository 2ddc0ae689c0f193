"""Evo 1 and StripedHyena-7B: folders in the layout of togethercomputer/stripedhyena (keys of its
configuration class, tensors of its model under `backbone.`), and the forward pass of that code,
written out in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn import functional as F

from headrace.console.errors import ConfigError
from headrace.models.cli import main
from headrace.models.conversion.folders import read_model
from headrace.models.model.model import Model

WIDTH, HEADS, DIM = 32, 4, 8
STRIPED: dict[str, Any] = {
    "model_type": "stripedhyena",
    "architectures": ["StripedHyenaModelForCausalLM"],
    "vocab_size": 23,
    "hidden_size": WIDTH,
    "num_filters": WIDTH,
    "num_layers": 4,
    "attn_layer_idxs": [1, 3],
    "hyena_layer_idxs": [0, 2, 4],
    "num_attention_heads": HEADS,
    "proj_groups": 2,
    "hyena_filter_groups": 1,
    "short_filter_length": 3,
    "short_filter_bias": True,
    "state_size": 2,
    "rotary_emb_base": 500,
    "inner_mlp_size": 40,
    "qkv_proj_bias": False,
    "mha_out_proj_bias": False,
    "column_split_hyena": True,
    "tie_embeddings": False,
    "final_norm": True,
    "use_flash_rmsnorm": True,
    "eps": 1e-5,
}
EVO = {
    **STRIPED,
    "proj_groups": 1,
    "rotary_emb_base": 100,
    "state_size": 3,
    "inner_mlp_size": None,
    "inner_size_multiple_of": 16,
    "qkv_proj_bias": True,
    "mha_out_proj_bias": True,
    "column_split_hyena": False,
    "tie_embeddings": True,
    "use_flash_rmsnorm": False,
    "eps": 1e-3,
    "mlp_activation": "gelu",
    "use_interpolated_rotary_pos_emb": True,
    "rotary_emb_scaling_factor": 4,
}


def draw_tensors(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Draw the tensors of a published model."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, scale: float = 0.3, shift: float = 0.0) -> Tensor:
        return shift + scale * torch.randn(shape, generator=generator)

    inner = settings["inner_mlp_size"] or 96
    tensors = {"embedding_layer.weight": draw(23, WIDTH), "norm.scale": draw(WIDTH, shift=1.0)}
    tensors["unembed.weight"] = (
        tensors["embedding_layer.weight"].clone() if settings["tie_embeddings"] else draw(23, WIDTH)
    )
    for number in range(settings["num_layers"]):
        block = {
            "pre_norm.scale": draw(WIDTH, shift=1.0),
            "post_norm.scale": draw(WIDTH, shift=1.0),
            "mlp.l1.weight": draw(inner, WIDTH),
            "mlp.l2.weight": draw(inner, WIDTH),
            "mlp.l3.weight": draw(WIDTH, inner),
        }
        if number in settings["attn_layer_idxs"]:
            kv = WIDTH // settings["proj_groups"]
            block["inner_mha_cls.Wqkv.weight"] = draw(WIDTH + 2 * kv, WIDTH)
            block["inner_mha_cls.out_proj.weight"] = draw(WIDTH, WIDTH)
            block["inner_mha_cls.rotary_emb.inv_freq"] = draw(DIM // 2)
            if settings["qkv_proj_bias"]:
                block["inner_mha_cls.Wqkv.bias"] = draw(WIDTH + 2 * kv)
                block["inner_mha_cls.out_proj.bias"] = draw(WIDTH)
        else:
            size = draw(WIDTH, settings["state_size"], 1, scale=0.1, shift=0.8)
            angle = draw(WIDTH, settings["state_size"], 1, scale=1.5)
            block |= {
                "filter.poles": torch.view_as_real(torch.polar(size, angle)).clone(),
                "filter.residues": draw(WIDTH, settings["state_size"], 1, 2),
                "filter.D": draw(WIDTH),
                "filter.short_filter_weight": draw(3 * WIDTH, 1, 3),
                "filter.short_filter_bias": draw(3 * WIDTH),
                "projections.weight": draw(3 * WIDTH, WIDTH),
                "projections.bias": draw(3 * WIDTH),
                "out_filter_dense.weight": draw(WIDTH, WIDTH),
                "out_filter_dense.bias": draw(WIDTH),
            }
        tensors |= {f"blocks.{number}.{name}": tensor for name, tensor in block.items()}
    return {f"backbone.{name}": tensor for name, tensor in tensors.items()}


def write_folder(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    torch.save(tensors, folder / "pytorch_model.bin")


def compute_published(
    tensors: dict[str, Tensor], settings: dict[str, Any], tokens: Tensor
) -> Tensor:
    """Return the logits by the equations of its model and its engine."""
    tensors = {name.removeprefix("backbone."): t.double() for name, t in tensors.items()}
    activation = {"gelu": F.gelu, "silu": F.silu}[settings.get("mlp_activation", "silu")]

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        if settings["use_flash_rmsnorm"]:
            return scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + settings["eps"])
        size = x.norm(2, dim=-1, keepdim=True) * WIDTH**-0.5
        return scale * (x / (size + settings["eps"]))

    u = tensors["embedding_layer.weight"][tokens]
    for number in range(settings["num_layers"]):
        prefix = f"blocks.{number}."
        block = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        mix = attend if number in settings["attn_layer_idxs"] else filter_by_poles
        u = u + mix(block, settings, norm(u, block["pre_norm.scale"]))
        x = norm(u, block["post_norm.scale"])
        gate = activation(x @ block["mlp.l1.weight"].T)
        u = u + (gate * (x @ block["mlp.l2.weight"].T)) @ block["mlp.l3.weight"].T
    return norm(u, tensors["norm.scale"]) @ tensors["unembed.weight"].T


def filter_by_poles(block: dict[str, Tensor], settings: dict[str, Any], x: Tensor) -> Tensor:
    length = x.shape[1]
    z = (x @ block["projections.weight"].T + block["projections.bias"]).transpose(1, 2)
    taps, bias = block["filter.short_filter_weight"], block["filter.short_filter_bias"]
    z = F.conv1d(z, taps, padding=2, groups=3 * WIDTH)[..., :length] + bias[:, None]
    if settings["column_split_hyena"]:
        heads = z.reshape(len(z), HEADS, 3 * DIM, length)
        x2, x1, v = (heads[:, :, part * DIM : (part + 1) * DIM].flatten(1, 2) for part in range(3))
    else:
        x2, x1, v = z.split(WIDTH, dim=1)
    poles = torch.view_as_complex(block["filter.poles"])
    residues = torch.view_as_complex(block["filter.residues"])
    h = (residues * poles ** torch.arange(length)).real.sum(1)
    w = x1 * v
    y = torch.zeros_like(w)
    for t in range(length):
        for lag in range(t + 1):
            y[..., t] += h[:, lag] * w[..., t - lag]
    y = ((y + w * block["filter.D"][:, None]) * x2).transpose(1, 2)
    return y @ block["out_filter_dense.weight"].T + block["out_filter_dense.bias"]


def attend(block: dict[str, Tensor], settings: dict[str, Any], x: Tensor) -> Tensor:
    length, kv_heads = x.shape[1], HEADS // settings["proj_groups"]
    qkv = x @ block["inner_mha_cls.Wqkv.weight"].T + block.get("inner_mha_cls.Wqkv.bias", 0.0)
    q, k, v = qkv.split([WIDTH, kv_heads * DIM, kv_heads * DIM], dim=-1)
    factor = settings.get("rotary_emb_scaling_factor", 1)
    speed = settings["rotary_emb_base"] ** (-torch.arange(0, DIM, 2) / DIM)
    angle = torch.outer(torch.arange(length) / factor, speed)[:, None].double()

    def turn(t: Tensor) -> Tensor:
        a, b = t.unflatten(-1, (-1, DIM)).chunk(2, dim=-1)
        return torch.cat(
            [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1
        )

    q, k, v = turn(q), turn(k), v.unflatten(-1, (-1, DIM))
    k, v = (t.repeat_interleave(HEADS // kv_heads, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
    bias = block.get("inner_mha_cls.out_proj.bias", 0.0)
    return y @ block["inner_mha_cls.out_proj.weight"].T + bias


@pytest.mark.parametrize("settings", [STRIPED, EVO], ids=["stripedhyena", "evo1"])
def test_logits_are_those_of_the_published_code(settings: dict[str, Any], tmp_path: Path) -> None:
    tensors = draw_tensors(settings)
    write_folder(tmp_path / "published", settings, tensors)
    config, ours = read_model(tmp_path / "published")
    model = Model(config)
    model.load_state_dict(ours)
    tokens = torch.randint(0, 23, (2, 19), generator=torch.Generator().manual_seed(5))
    expected = compute_published(tensors, settings, tokens)
    assert (model.double().eval()(tokens) - expected).abs().max() < 1e-5 * expected.abs().max()
    split = {**settings, "column_split_hyena": not settings["column_split_hyena"]}
    other_layout = compute_published(tensors, split, tokens)
    assert (other_layout - expected).abs().max() > 0.1, "a negative control"

    done = CliRunner().invoke(
        main,
        ["convert", str(tmp_path / "published"), str(tmp_path / "ours"), "--format", "headrace"],
    )
    assert done.exit_code == 0, done.output
    assert read_model(tmp_path / "ours")[0] == config


def test_checkpoints_of_the_code_itself_lack_the_prefix(tmp_path: Path) -> None:
    tensors = {n.removeprefix("backbone."): t for n, t in draw_tensors(EVO).items()}
    write_folder(tmp_path / "published", EVO, tensors)
    assert len(read_model(tmp_path / "published")[1]) > 40


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hyena_filter_groups": 4}, ["hyena_filter_groups", "only 1"]),
        ({"smeared_gqa": True}, ["smeared_gqa"]),
        ({"hyena_layer_idxs": [0]}, ["hyena_layer_idxs", "[2]"]),
        ({"num_filters": 8}, ["num_filters", "only 32"]),
    ],
)
def test_what_is_lacking_is_refused_by_name(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    write_folder(tmp_path / "published", {**STRIPED, **changes}, {})
    with pytest.raises(ConfigError) as raised:
        read_model(tmp_path / "published")
    assert not [word for word in words if word not in str(raised.value)]
