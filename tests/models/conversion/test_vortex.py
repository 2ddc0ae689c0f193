"""Comparison with the forward pass of Vortex, written out here on its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

from headrace.console.config import build
from headrace.console.errors import CheckpointError, ConfigError, StorageError
from headrace.models.accounting.count import build_meta
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.pattern import parse_pattern
from headrace.models.conversion.folders import read_model, write_model
from headrace.models.conversion.rules import export_tensors
from headrace.models.conversion.vortex import derive_tensors, rules
from headrace.models.conversion.vortex_config import read_config, write_config
from headrace.models.model.model import Model

WIDTH, HEADS, GROUPS = 32, 4, 8
OPERATORS: dict[str, dict[str, Any]] = {
    "se": {"kind": "hyena-se", "groups": GROUPS},
    "mr": {"kind": "hyena-mr", "groups": GROUPS, "filter_horizon": 512, "decay": "strong"},
    "li": {"kind": "hyena-li", "state_size": 4},
    "attention": {
        "kind": "attention",
        "heads": HEADS,
        "output_bias": True,
        "rope": {"base": 1e4, "scaling": "linear", "factor": 8.0},
    },
    "gelu": {"kind": "glu", "hidden": 48, "activation": "gelu"},
    "identity": {"kind": "glu", "hidden": 48, "activation": "identity"},
}


def config(**changes: Any) -> ModelConfig:
    data: dict[str, Any] = {
        "vocab_size": 23,
        "width": WIDTH,
        "pattern": "[se/gelu, mr, li, attention, se]",
        "mlp": "identity",
        "operators": OPERATORS,
        "norm": "rms-eps-outside",
        "norm_eps": 1e-6,
        **changes,
    }
    layers = parse_pattern(data["pattern"], mlp=data["mlp"])
    used = {name for layer in layers for name in layer.names}
    data["operators"] = {k: v for k, v in data["operators"].items() if k in used}
    return build(ModelConfig, data, source="a test")


def model_of(config: ModelConfig) -> Model:
    model = Model(config)
    model.init_weights(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return scale * x / (x.norm(dim=-1, keepdim=True) * WIDTH**-0.5 + 1e-6)


def published(tensors: dict[str, Tensor], settings: dict[str, Any], tokens: Tensor) -> Tensor:
    """Vortex's forward pass over the tensors of a checkpoint."""
    u = tensors["embedding_layer.weight"][tokens]
    length = tokens.shape[1]
    for number in range(settings["num_layers"]):
        block_tensors = {
            name.removeprefix(f"blocks.{number}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"blocks.{number}.")
        }
        x = rms(u, block_tensors["pre_norm.scale"])
        if number in settings["attn_layer_idxs"]:
            y = attention(block_tensors, settings, x)
        else:
            z = (x @ block_tensors["projections.weight"].T).transpose(1, 2)
            z = F.conv1d(
                z, block_tensors["filter.short_filter_weight"], padding=2, groups=3 * WIDTH
            )
            post, pre, v = (z[:, part::3, :length] for part in range(3))
            w = pre * v
            if number in settings["hcl_layer_idxs"]:
                time = torch.arange(length)
                residues, poles = (
                    block_tensors["filter.residues"],
                    block_tensors["filter.log_poles"],
                )
                h = (residues[..., None] * (poles * time).exp()).sum(1)
                y = fft_convolution(w, h) + w * block_tensors["filter.D"][:, None]
            elif number in settings["hcm_layer_idxs"]:
                h = block_tensors["filter.h"].repeat_interleave(WIDTH // GROUPS, 0)[:, 0, :length]
                y = fft_convolution(w, h) + w * block_tensors["filter.D"][:, None]
            else:
                h = block_tensors["filter.h"].repeat_interleave(WIDTH // GROUPS, 0)
                y = F.conv1d(w, h, padding=h.shape[-1] - 1, groups=WIDTH)[..., :length]
            y = (post * y).transpose(1, 2) @ block_tensors["out_filter_dense.weight"].T
            y = y + block_tensors["out_filter_dense.bias"]
        u = u + y
        x = rms(u, block_tensors["post_norm.scale"])
        gate = x @ block_tensors["mlp.l1.weight"].T
        if number == 0 or not settings["evo2_style_activations"]:
            gate = F.gelu(gate)
        u = u + (gate * (x @ block_tensors["mlp.l2.weight"].T)) @ block_tensors["mlp.l3.weight"].T
    return rms(u, tensors["norm.scale"]) @ tensors["embedding_layer.weight"].T


def fft_convolution(u: Tensor, h: Tensor) -> Tensor:
    size = 2 * u.shape[-1]
    product = torch.fft.rfft(u, n=size) * torch.fft.rfft(h, n=size)
    result: Tensor = torch.fft.irfft(product, n=size)[..., : u.shape[-1]]
    return result


def attention(block_tensors: dict[str, Tensor], settings: dict[str, Any], x: Tensor) -> Tensor:
    rows, length, _ = x.shape
    dim = WIDTH // HEADS
    qkv = (x @ block_tensors["inner_mha_cls.Wqkv.weight"].T).view(rows, length, HEADS, 3, dim)
    time = torch.arange(length) / settings["rotary_emb_scaling_factor"]
    speed = settings["rotary_emb_base"] ** (-torch.arange(0, dim, 2) / dim)
    angle = torch.outer(time, speed).float()[:, None]

    def turn(t: Tensor) -> Tensor:
        a, b = t[..., : dim // 2], t[..., dim // 2 :]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    q, k, v = turn(qkv[..., 0, :]), turn(qkv[..., 1, :]), qkv[..., 2, :]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / dim**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
    return (
        y @ block_tensors["inner_mha_cls.out_proj.weight"].T
        + block_tensors["inner_mha_cls.out_proj.bias"]
    )


@pytest.mark.parametrize("length", [1, 7, 150])
@pytest.mark.parametrize("mlp", ["identity", "gelu"])
def test_logits_equal_vortex(length: int, mlp: str) -> None:
    ours = model_of(config(mlp=mlp))
    tokens = torch.randint(0, 23, (2, length), generator=torch.Generator().manual_seed(5))
    settings = write_config(ours.config)
    assert settings["evo2_style_activations"] == (mlp == "identity")
    theirs = dict(export_tensors(rules(ours.config), dict(ours.named_parameters())))
    expected = published(theirs, settings, tokens)
    assert (ours(tokens) - expected).abs().max() < 1e-8


@pytest.mark.parametrize(
    "tensor",
    [
        "blocks.0.filter.h",
        "blocks.1.filter.h",
        "blocks.2.filter.short_filter_weight",
        "blocks.1.projections.weight",
        "blocks.3.inner_mha_cls.Wqkv.weight",
        "blocks.2.filter.log_poles",
    ],
)
def test_another_order_changes_the_logits(tensor: str) -> None:
    ours = model_of(config())
    tokens = torch.randint(0, 23, (2, 40), generator=torch.Generator().manual_seed(5))
    theirs = dict(export_tensors(rules(ours.config), dict(ours.named_parameters())))
    dim = 0 if tensor.endswith(("weight", "poles")) else -1
    theirs[tensor] = theirs[tensor].flip(dim)
    expected = published(theirs, write_config(ours.config), tokens)
    assert (ours(tokens) - expected).abs().max() > 1e-4


def test_a_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    ours = model_of(config())
    write_model(ours.config, ours.state_dict(), tmp_path / "first", format="vortex")
    read, tensors = read_model(tmp_path / "first")
    write_model(read, tensors, tmp_path / "second", format="vortex")
    again, same_tensors = read_model(tmp_path / "second")
    assert again == read
    assert all(torch.equal(tensors[name], same_tensors[name]) for name in tensors)
    first, second = (torch.load(tmp_path / name / "model.pt") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    model = Model(read).double()
    model.load_state_dict(tensors)
    tokens = torch.randint(0, 23, (2, 40), generator=torch.Generator().manual_seed(5))
    assert (model(tokens) - ours(tokens)).abs().max() < 1e-12


PUBLISHED = {
    "evo2-1b-8k": ("evo2_1b_base", 270, 14, 2_218_806_272),
    "evo2-7b-8k": ("evo2_7b_base", 345, 18, 12_968_673_408),
    "evo2-7b-1m": ("evo2_7b", 345, 18, 13_170_000_000),
    "evo2-40b-8k": ("evo2_40b_base", 537, 137, 80_679_669_760),
    "evo2-40b-1m": ("evo2_40b", 537, 137, 82_252_533_760),
}
"""Released checkpoints: tensors, tensors in fp32, and bytes."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_have_the_tensors_of_released_checkpoints(name: str) -> None:
    """Number, shape and type are equal; 40B keeps norms and rotary frequencies in fp32."""
    config = load_model_config(name)
    theirs = dict(export_tensors(rules(config), dict(build_meta(config).named_parameters())))
    theirs |= derive_tensors(config, theirs)
    model, tensors, in_fp32, size = PUBLISHED[name]
    exact = ("log_poles", "residues")
    if model.startswith("evo2_40b"):
        exact += ("norm.scale", "inv_freq")
    wide = {key for key in theirs if key.endswith(exact)}
    assert (len(theirs), len(wide)) == (tensors, in_fp32)
    assert sum(t.numel() * (4 if key in wide else 2) for key, t in theirs.items()) == size


def test_settings_equal_released_models() -> None:
    released = {  # base and factor of rotary positions, the longest row, layers of attention
        "evo2-1b-8k": (1e4, 1, 8192, [3, 10, 17, 24]),
        "evo2-7b-1m": (1e4, 128, 2**20, [3, 10, 17, 24, 31]),
        "evo2-7b-262k": (1e4, 32, 2**18, [3, 10, 17, 24, 31]),
        "evo2-20b-1m": (1e6, 128, 2**20, [3, 10, 17]),
        "evo2-40b-8k": (1e6, 1, 8192, [3, 10, 17, 24, 31, 35, 42, 49]),
        "evo2-40b-1m": (1e6, 128, 2**20, [3, 10, 17, 24, 31, 35, 42, 49]),
    }
    for name, values in released.items():
        settings = write_config(load_model_config(name))
        keys = ("rotary_emb_base", "rotary_emb_scaling_factor", "max_seqlen", "attn_layer_idxs")
        assert tuple(settings[key] for key in keys) == values
        assert settings["use_interpolated_rotary_pos_emb"] == (values[1] > 1)
        assert read_config(settings) == read_config(write_config(read_config(settings)))


def test_shipped_models_have_vortex_settings() -> None:
    for name in ("evo2-1b-8k", "evo2-7b-8k", "evo2-7b-1m", "evo2-40b-8k", "evo2-40b-1m"):
        settings = write_config(load_model_config(name))
        assert settings["evo2_style_activations"]
        assert settings["num_layers"] == sum(
            len(settings[f"{sort}_layer_idxs"]) for sort in ("hcs", "hcm", "hcl", "attn")
        )
    assert settings["attn_layer_idxs"] == [3, 10, 17, 24, 31, 35, 42, 49]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pattern": "[se, mr, li]"}, "attn"),
        ({"norm": "layer"}, "norm"),
        ({"final_norm": "layer"}, "norm"),
        ({"pattern": "[se, mr/gelu, li, attention]"}, "activation"),
        (
            {"operators": {**OPERATORS, "mr": {**OPERATORS["mr"], "taps": 64}}},
            "128 taps",
        ),
        ({"operators": {**OPERATORS, "li": {**OPERATORS["li"], "groups": 4}}}, "shared"),
        ({"operators": {**OPERATORS, "mr": {**OPERATORS["mr"], "slow_heads": True}}}, "slow heads"),
    ],
)
def test_unsuitable_models_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    unsuitable = config(**changes)
    with pytest.raises(CheckpointError, match=words):
        write_model(unsuitable, Model(unsuitable).state_dict(), tmp_path / "out", format="vortex")
    assert not list(tmp_path.iterdir())


def test_unfit_folders_are_refused(tmp_path: Path) -> None:
    ours = model_of(config())
    write_model(ours.config, ours.state_dict(), tmp_path, format="vortex")
    file = tmp_path / "config.yml"
    settings = yaml.safe_load(file.read_text())
    for changes, error, words in (
        ({"state_size": 5}, CheckpointError, r"log_poles.*\(32, 5\).*\(32, 4\)"),
        ({"hyena_flip_x1x2": True}, ConfigError, "hyena_flip_x1x2"),
        ({"rotary_emb_base": 1e11}, ConfigError, "rotary_emb_base: .* a base of about 1e.04"),
        ({"num_attention_heads": 8}, ConfigError, "num_attention_heads: heads have 4 channels"),
        ({"hcs_layer_idxs": [0]}, ConfigError, r"without a kind: \[4\]"),
        ({"num_layers": "5"}, ConfigError, "num_layers: should be a number, not the text '5'"),
    ):
        file.write_text(yaml.safe_dump({**settings, **changes}))
        with pytest.raises(error, match=words) as raised:
            read_model(tmp_path)
        if error is ConfigError:
            assert f"1 problem in {file}\n" in str(raised.value), "the file that holds the settings"
    file.write_text(yaml.safe_dump(settings))
    (tmp_path / "model.pt").write_bytes(b"rubbish")
    with pytest.raises(StorageError, match=r"model\.pt"):
        read_model(tmp_path)
