"""Checkpoints of Savanna: the layout that its code and DeepSpeed write, read as data."""

from __future__ import annotations

import collections
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.savanna_configs import DATA, STRIPED
from torch import Tensor
from torch.nn import functional as F

from headrace.console.errors import CheckpointError, StorageError
from headrace.models.config.config import ModelConfig
from headrace.models.conversion.folders import convert, find_format, read_model
from headrace.models.conversion.savanna.checkpoint import CUT_COLUMNS, CUT_ROWS
from headrace.models.model.model import Model

WIDTH, HEADS, LAYERS, LENGTH, STATES, TAPS = 64, 4, 6, 128, 16, 32
KINDS = ["se", "mr", "li", "attention", "se", "li"]


def draw_module(config: ModelConfig) -> dict[str, Tensor]:
    """Return tensors with the names and shapes of Savanna's model, for one rank."""
    torch.manual_seed(1)
    hidden = [getattr(config.operators[layer.mlp or ""], "hidden", 0) for layer in config.layers]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape) / shape[-1] ** 0.5

    module = {"sequential.0.word_embeddings.weight": normal(config.vocab_size, WIDTH)}
    for number, kind in enumerate(KINDS):
        layer = {
            "input_layernorm.weight": 1 + 0.1 * torch.randn(WIDTH),
            "pre_mlp_layernorm.weight": 1 + 0.1 * torch.randn(WIDTH),
            "mlp.w1.weight": normal(hidden[number], WIDTH),
            "mlp.w2.weight": normal(hidden[number], WIDTH),
            "mlp.w3.weight": normal(WIDTH, hidden[number]),
            "mlp.w3._extra_state": torch.zeros(0),
            "mixer.dense_projection.weight": normal(3 * WIDTH, WIDTH),
            "mixer.dense.weight": normal(WIDTH, WIDTH),
            "mixer.dense.bias": torch.randn(WIDTH),
        }
        if kind == "attention":
            layer["mixer.rotary_emb.inv_freq"] = torch.ones(WIDTH // HEADS // 2)
        else:
            layer["mixer.hyena_proj_conv.short_conv_weight"] = normal(3 * WIDTH, 3)
        if kind == "se":
            layer["mixer.mixer.short_conv.short_conv_weight"] = normal(16, 1, 7)
        if kind in ("mr", "li"):
            layer["mixer.mixer.conv_bias"] = torch.randn(WIDTH)
        if kind == "mr":
            rates = torch.logspace(-2, 2, 4).repeat(2)[:, None]  # weak, twice
            layer["mixer.mixer.filter.h"] = normal(8, LENGTH)
            layer["mixer.mixer.filter.decay"] = torch.exp(-rates * torch.linspace(0, 1, LENGTH))
        if kind == "li":
            layer["mixer.mixer.filter.p"] = -1 + 0.1 * torch.randn(WIDTH, STATES)
            layer["mixer.mixer.filter.gamma"] = torch.rand(WIDTH, STATES).add(0.1).log()
            layer["mixer.mixer.filter.R"] = normal(WIDTH, STATES)
            layer["mixer.mixer.filter.t"] = torch.arange(LENGTH).float()[None, None]
        module |= {f"sequential.{number + 2}.{name}": tensor for name, tensor in layer.items()}
    module[f"sequential.{LAYERS + 3}.norm.weight"] = 1 + 0.1 * torch.randn(WIDTH)
    return module


def is_hyena_projection(name: str) -> bool:
    if not name.endswith(("mixer.dense_projection.weight", "short_conv_weight")):
        return False
    kind = KINDS[int(name.split(".")[1]) - 2]
    return kind != "attention" and "mixer.mixer" not in name


def save(module: dict[str, Tensor], folder: Path, ranks: int, text: str) -> None:
    """Save `global_step…` as DeepSpeed does, with random states and settings beside the tensors."""
    (folder / "configs").mkdir(parents=True)
    (folder / "configs/model.yml").write_text(text)
    (folder / "configs/data.yml").write_text(DATA)
    in_parts = "interleave_projections: false" in text
    for rank in range(ranks):
        local = collections.OrderedDict()
        for name, tensor in module.items():
            parts = 3 if in_parts and is_hyena_projection(name) else 1
            dim = 0 if name.endswith(CUT_ROWS) else 1 if name.endswith(CUT_COLUMNS) else None
            if dim is None:
                local[name] = tensor.clone()
            else:
                chunks = [part.chunk(ranks, dim)[rank] for part in tensor.chunk(parts)]
                local[name] = torch.cat(chunks, dim).clone()
        state = {
            "module": local,
            "param_shapes": [{name: tensor.shape for name, tensor in local.items()}],
            "iteration": 7,
            "dp_world_size": 2,
            "sparse_tensor_module_names": set(),
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
        }
        torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")


def config_of(tmp_path: Path, text: str) -> ModelConfig:
    from headrace.models.conversion.savanna.convert import check_model
    from headrace.models.conversion.savanna.settings import read_settings

    file = tmp_path / "settings.yml"
    file.write_text(text)
    return check_model(read_settings([file]))


def hyena_output(module: dict[str, Tensor], number: int, kind: str, u: Tensor) -> Tensor:
    """Savanna's sequence mixer, interleaved, written out for a row u [length, width]."""
    names = {
        name.removeprefix(f"sequential.{number + 2}.mixer."): tensor
        for name, tensor in module.items()
        if name.startswith(f"sequential.{number + 2}.mixer.")
    }
    length = len(u)

    def convolve(x: Tensor, h: Tensor) -> Tensor:  # h [channels, taps], the first tap is now
        taps = min(h.shape[1], length)
        padded = F.pad(x, (taps - 1, 0))
        return F.conv1d(padded[None], h[:, :taps].flip(-1)[:, None], groups=len(h))[0]

    features = (u @ names["dense_projection.weight"].T).T
    features = convolve(features, names["hyena_proj_conv.short_conv_weight"].flip(-1))
    x1, x2, v = features.view(WIDTH, 3, length).unbind(1)
    z = x2 * v
    if kind == "se":
        h = names["mixer.short_conv.short_conv_weight"].squeeze(1).flip(-1)
    elif kind == "mr":
        h = (names["mixer.filter.h"] * names["mixer.filter.decay"])[:, :TAPS]
    else:
        rates = -torch.exp(names["mixer.filter.p"]) * torch.exp(names["mixer.filter.gamma"])
        time = torch.arange(length)
        h = torch.einsum("dn,dnt->dt", names["mixer.filter.R"], torch.exp(rates[..., None] * time))
    y = convolve(z, h.repeat_interleave(WIDTH // len(h), 0))
    if kind != "se":
        y = y + z * names["mixer.conv_bias"][:, None]
    return (x1 * y).T @ names["dense.weight"].T + names["dense.bias"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_operators_compute_what_savanna_does(ranks: int, tmp_path: Path) -> None:
    text = STRIPED.replace("interleave_projections: false", "interleave_projections: true")
    module = draw_module(config_of(tmp_path, text))
    save(module, tmp_path / "global_step7", ranks, text)
    assert find_format(tmp_path / "global_step7") == "savanna"
    config, tensors = read_model(tmp_path / "global_step7")
    model = Model(config)
    model.load_state_dict(tensors)
    u = torch.randn(1, 48, WIDTH)
    batch = model.batch_context(torch.zeros(1, 48, dtype=torch.long), None, None, None)
    for number, kind in enumerate(KINDS):
        operator = model.typed_blocks()[number].mixer.operator
        if kind == "attention":
            continue
        y = operator(u, batch.call_context(None))[0]
        expected = hyena_output(module, number, kind, u[0])
        assert (y - expected).abs().max() < 1e-4 * max(1, float(expected.abs().max())), kind
    qkv = tensors["blocks.3.mixer.operator.qkv.weight"].view(3, HEADS, -1, WIDTH)
    stored = module["sequential.5.mixer.dense_projection.weight"].view(HEADS, 3, -1, WIDTH)
    assert torch.equal(qkv, stored.transpose(0, 1))


def test_projections_in_parts_are_the_same_model(tmp_path: Path) -> None:
    """`interleave_projections: false`, on two ranks, holds the rows of each rank part by part."""
    config = config_of(tmp_path, STRIPED)
    module = draw_module(config)
    save(module, tmp_path / "parts", 2, STRIPED)
    tensors = read_model(tmp_path / "parts")[1]
    weight = module["sequential.2.mixer.dense_projection.weight"]
    assert torch.equal(tensors["blocks.0.mixer.operator.qkv.weight"], weight)
    taps = module["sequential.2.mixer.hyena_proj_conv.short_conv_weight"]
    assert torch.equal(tensors["blocks.0.mixer.operator.featurizer.taps"], taps.flip(-1))
    convert(tmp_path / "parts", tmp_path / "ours", format="headrace")
    same_tensors = read_model(tmp_path / "ours")[1]
    assert all(torch.equal(tensors[name], same_tensors[name]) for name in tensors)


class Planted:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_no_code_of_a_file_runs_and_no_tensor_is_lost(tmp_path: Path) -> None:
    module = draw_module(config_of(tmp_path, STRIPED))
    save(module, tmp_path / "step", 1, STRIPED)
    file = tmp_path / "step/mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    torch.save({**state, "planted": Planted(tmp_path / "made")}, file)
    pickle.loads(pickle.dumps(Planted(tmp_path / "control")))
    assert (tmp_path / "control").exists(), "a negative control"
    read_model(tmp_path / "step")
    assert not (tmp_path / "made").exists()

    class Holder(dict[str, Any]):
        pass

    Holder.__qualname__ = Holder.__name__ = "Holder"
    globals()["Holder"] = Holder
    torch.save({**state, "module": Holder(state["module"])}, file)
    with pytest.raises(StorageError, match="stored tensors, and"):
        read_model(tmp_path / "step")


def test_faults_are_named(tmp_path: Path) -> None:
    module = draw_module(config_of(tmp_path, STRIPED))
    decayed = {**module, "sequential.3.mixer.mixer.filter.decay": torch.ones(8, LENGTH)}
    save(decayed, tmp_path / "decay", 1, STRIPED)
    with pytest.raises(CheckpointError, match=r"filter\.decay is not the decay of"):
        read_model(tmp_path / "decay")
    save({}, tmp_path / "zero3", 1, STRIPED)
    with pytest.raises(StorageError, match="ZeRO-3"):
        read_model(tmp_path / "zero3")
    del module["sequential.4.mixer.mixer.filter.R"]
    save(module, tmp_path / "missing", 1, STRIPED)
    with pytest.raises(CheckpointError, match=r"sequential\.4\.mixer\.mixer\.filter\.R is missing"):
        read_model(tmp_path / "missing")
    (tmp_path / "missing/mp_rank_00_model_states.pt").write_bytes(b"rubbish")
    with pytest.raises(StorageError, match="is damaged"):
        read_model(tmp_path / "missing")
