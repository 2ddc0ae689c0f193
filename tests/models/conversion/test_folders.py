"""Model folders: conversion between all formats, and failures that leave no folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from headrace.console.errors import CheckpointError, StorageError, UserError
from headrace.models.cli import main
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.conversion import folders
from headrace.models.conversion.files import INDEX, write_safetensors
from headrace.models.conversion.folders import FORMATS, convert, read_model, write_model
from headrace.models.model.model import Model
from headrace.models.weights import Weights

ZAMBA = "pattern='[mamba] * 2 + [shared>mamba] + [mamba] * 2 + [shared>mamba] + [mamba]'"
SMALL = {
    "llama3-8b": ["pattern='[attention] * 2'", "width=32", "operators.glu.hidden=48"],
    "mamba-130m": ["pattern='[mamba] * 2'", "width=32"],
    "mamba2-130m": ["pattern='[mamba] * 2'", "width=32", "operators.mamba.head_dim=8"],
    "zamba-7b": [ZAMBA, "width=32", "operators.shared.hidden=48", "operators.shared.heads=4"],
    "zamba2-1.2b": [ZAMBA, "width=32", "operators.mamba.head_dim=8", "operators.shared.hidden=48"],
    "gpt2-small": ["pattern='[attention] * 2'", "width=48", "operators.mlp.hidden=64"],
    "mamba-hybrid-9.8b": [
        "pattern='[mamba, attention]'",
        "width=32",
        "operators.mamba.head_dim=8",
        "operators.glu.hidden=48",
    ],
}
"""Shipped models that transformers supports, made narrow."""


def small(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[ModelConfig, dict[str, Tensor]]:
    changes = ["vocab_size=64", *SMALL[name]]
    if name in ("llama3-8b", "mamba-hybrid-9.8b"):
        changes += ["operators.attention.heads=8", "operators.attention.kv_heads=2"]
    if name == "mamba-hybrid-9.8b":
        changes += ["operators.attention.rope.channels=2"]
    if name == "zamba2-1.2b":
        changes += ["operators.shared.heads=4", "operators.shared.lora_rank=3"]
    model = Model(load_model_config(name, changes))
    model.init_weights(1)
    return model.config, {k: v.to(dtype) for k, v in model.state_dict().items()}


def equal_tensors(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


@pytest.mark.parametrize("name", SMALL)
def test_every_format_keeps_every_bit(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, tensors = small(name)
    write_model(config, tensors, tmp_path / "ours", format="headrace")
    convert(tmp_path / "ours", tmp_path / "theirs", format="huggingface")
    convert(tmp_path / "theirs", tmp_path / "again", format="headrace")
    assert read_model(tmp_path / "ours")[0] == config
    for folder in ("ours", "theirs", "again"):
        assert equal_tensors(tensors, read_model(tmp_path / folder)[1])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", dtype="auto", attn_implementation="eager"
    ).eval()
    assert loaded.dtype == torch.bfloat16
    model = Model(read_model(tmp_path / "again")[0])
    model.load_state_dict({key: tensor.float() for key, tensor in tensors.items()})
    ids = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = loaded.float()(ids, use_cache=False).logits
        assert (model.eval()(ids) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("scaling", ["linear", "ntk", "yarn", "llama3"])
def test_scaled_rotary_positions_equal_transformers(scaling: str, tmp_path: Path) -> None:
    """Also beyond the original length."""
    transformers = pytest.importorskip("transformers")
    changes = [*SMALL["llama3-8b"], "vocab_size=64", "operators.attention.heads=4"]
    changes += ["operators.attention.kv_heads=2", "operators.attention.rope.base=500"]
    rope = f"{{base: 500, scaling: {scaling}, factor: 4, original_length: 16}}"
    plain = Model(load_model_config("llama3-8b", changes))
    model = Model(load_model_config("llama3-8b", [*changes, f"operators.attention.rope={rope}"]))
    model.init_weights(1)
    for parameter in model.parameters():
        parameter.data *= 5  # so that attention is far from even
    plain.load_state_dict(model.state_dict())
    write_model(model.config, model.state_dict(), tmp_path / "out", format="huggingface")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    ids = torch.randint(0, 64, (2, 61), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = loaded.eval()(ids, use_cache=False).logits
        bound = 1e-5 * max(1.0, float(expected.abs().max()))
        assert (model(ids) - expected).abs().max() < bound
        assert (plain(ids) - expected).abs().max() > 100 * bound, "a negative control"


def test_stripedhyena_in_every_format(tmp_path: Path) -> None:
    changes = ["pattern='[se/gelu, mr, li, attention]'", "width=32", "vocab_size=64"]
    changes += [f"operators.{name}.groups=8" for name in ("se", "mr")]
    changes += [f"operators.{name}.hidden=48" for name in ("gelu", "identity")]
    model = Model(load_model_config("evo2-1b-8k", [*changes, "operators.attention.heads=4"]))
    model.init_weights(1)
    tensors = model.bfloat16().state_dict()
    write_model(model.config, tensors, tmp_path / "a", format="vortex")
    convert(tmp_path / "a", tmp_path / "b", format="headrace")
    convert(tmp_path / "b", tmp_path / "c", format="vortex")
    first, third = (torch.load(tmp_path / name / "model.pt") for name in "ac")
    assert equal_tensors(first, third)
    assert (tmp_path / "a/config.yml").read_bytes() == (tmp_path / "c/config.yml").read_bytes()


def test_a_tokenizer_is_copied(tmp_path: Path) -> None:
    config, tensors = small("llama3-8b")
    source, tokenizer = tmp_path / "source", tmp_path / "tokenizer"
    write_model(config, tensors, source, format="headrace")
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("")
    convert(source, tmp_path / "one", format="huggingface")
    files = {file.name for file in (tmp_path / "one").iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json"}
    tokenizer.mkdir()
    with pytest.raises(StorageError, match="no tokenizer in"):
        convert(source, tmp_path / "two", format="huggingface", tokenizer=tokenizer)
    assert not (tmp_path / "two").exists()
    (tokenizer / "tokenizer.json").write_text("another")
    convert(source, tmp_path / "two", format="huggingface", tokenizer=tokenizer)
    assert (tmp_path / "two" / "tokenizer.json").read_text() == "another"


def test_files_keep_to_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = small("llama3-8b")
    monkeypatch.setattr(write_safetensors, "__defaults__", (10_000,))
    write_model(config, tensors, tmp_path / "out", format="headrace")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert max(file.stat().st_size for file in files) < 12_000
    assert equal_tensors(tensors, read_model(tmp_path / "out")[1])
    files[1].unlink()
    with pytest.raises(StorageError, match=files[1].name):
        read_model(tmp_path / "out")


def test_tensors_are_read_lazily(tmp_path: Path) -> None:
    config, tensors = small("llama3-8b")
    asked = []
    lazy = Weights(
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda name: asked.append(name) or tensors[name],  # type: ignore[func-returns-value]
    )
    broken = Weights({**lazy.shapes, "norm.weight": (31,)}, lazy.read)
    with pytest.raises(CheckpointError, match=r"norm.weight is \(32,\), found \(31,\)"):
        write_model(config, broken, tmp_path / "out", format="huggingface")
    assert asked == []
    write_model(config, lazy, tmp_path / "out", format="huggingface")
    assert sorted(asked) == sorted(tensors)


def test_a_failed_write_leaves_no_folder(tmp_path: Path) -> None:
    config, tensors = small("llama3-8b")
    torn = {**tensors, "norm.weight": tensors["norm.weight"][:-1]}
    with pytest.raises(CheckpointError):
        write_model(config, torn, tmp_path / "out", format="headrace")

    def fail(name: str) -> Tensor:
        if name == "norm.weight":
            raise OSError("no space left on device")
        return tensors[name]

    late = Weights({name: tensor.shape for name, tensor in tensors.items()}, fail)
    with pytest.raises(StorageError, match=r"cannot write .*no space left"):
        write_model(config, late, tmp_path / "out", format="headrace")
    assert not list(tmp_path.iterdir())
    partial = tmp_path / ".out.partial"  # of one that was killed
    partial.mkdir()
    (partial / "part-0").write_text("half")
    write_model(config, tensors, tmp_path / "out", format="headrace")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert len(list((tmp_path / "out").iterdir())) == 2
    with pytest.raises(StorageError, match="exists already"):
        write_model(config, tensors, tmp_path / "out", format="headrace")


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not a folder"):
        read_model(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="holds no model") as raised:
        read_model(tmp_path)
    assert "config.json (huggingface)" in str(raised.value)
    for name in ("config.json", "model.yaml"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="several models: headrace, huggingface"):
        read_model(tmp_path)


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    config, tensors = small("llama3-8b")
    write_model(config, tensors, tmp_path / "out", format="headrace")
    file = tmp_path / "out" / "model.yaml"
    file.write_text(file.read_text().replace("hidden: 48", "hidden: 40"))
    with pytest.raises(CheckpointError) as raised:
        read_model(tmp_path / "out")
    for words in ("blocks.0.mlp.operator.gate_up.weight", "(80, 32)", "(96, 32)", "blocks.1."):
        assert words in str(raised.value)
    index = tmp_path / "out" / INDEX
    for content in ({}, {"weight_map": {"norm.weight": 3}}):
        index.write_text(json.dumps(content))
        with pytest.raises(StorageError, match="no `weight_map` of file names"):
            read_model(tmp_path / "out")


def test_the_convert_command(tmp_path: Path) -> None:
    config, tensors = small("mamba-130m")
    write_model(config, tensors, tmp_path / "a", format="headrace")

    def run(*words: str) -> Any:
        return CliRunner().invoke(main, ["convert", *words])

    done = run(str(tmp_path / "a"), str(tmp_path / "b"), "--format", "huggingface")
    assert done.exit_code == 0 and done.stdout == "" and "b: mamba" in done.stderr
    assert equal_tensors(tensors, read_model(tmp_path / "b")[1])
    again = run(str(tmp_path / "a"), str(tmp_path / "b"), "--format", "huggingface")
    assert again.exit_code == 1 and "exists already" in again.stderr
    refused = run(str(tmp_path / "a"), str(tmp_path / "c"), "--format", "vortex")
    assert refused.exit_code == 1 and "Vortex cannot represent this model" in refused.stderr
    assert run(str(tmp_path / "a"), str(tmp_path / "c")).exit_code == 2
    unknown = run(str(tmp_path / "a"), str(tmp_path / "c"), "--format", "huggingfaec")
    assert unknown.exit_code == 2 and "huggingface" in unknown.stderr
    assert all(name in unknown.stderr for name in FORMATS)
    assert folders.find_format(tmp_path / "b") == "huggingface"


def test_every_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    model = Model(load_model_config("tiny-transformer", ["vocab_size=64"]))
    model.init_weights(1)
    before = os.umask(0o022)
    try:
        for format in ("headrace", "huggingface"):
            write_model(model.config, model.state_dict(), tmp_path / format, format=format)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {f"{path.stat().st_mode & 0o777:o}" for path in files} == {"644"} and len(files) > 3


def test_a_read_only_file_system_is_named(tmp_path: Path, read_only: Path) -> None:
    model = Model(load_model_config("tiny-transformer", ["vocab_size=64"]))
    model.init_weights(1)
    with pytest.raises(StorageError, match="the file system is read-only") as caught:
        write_model(model.config, model.state_dict(), read_only / "out", format="headrace")
    assert "Errno" not in str(caught.value)
