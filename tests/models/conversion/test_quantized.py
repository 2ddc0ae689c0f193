"""Published weights in 4 and 8 bits, read as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.families import CASES
from torch import Tensor

from headrace.console.errors import CheckpointError, ConfigError
from headrace.models.conversion import FAMILIES
from headrace.models.conversion.files import read_json, read_safetensors, write_safetensors
from headrace.models.conversion.folders import read_model, write_model
from headrace.models.conversion.quantized import dequantize, unpack_mxfp4
from headrace.models.model.model import Model
from headrace.models.weights import Weights

FP8 = torch.float8_e4m3fn


def write_folder(folder: Path, case: str, **changes: Any) -> dict[str, Tensor]:
    """Write a folder of random bf16 weights; return its tensors."""
    kind, settings = CASES[case]
    config = FAMILIES[kind].read({**settings, **changes})
    model = Model(config)
    model.init_weights(1)
    write_model(config, model.bfloat16().state_dict(), folder, format="huggingface", family=kind)
    return dict(read_safetensors(folder))


def quantize_folder(folder: Path, tensors: dict[str, Tensor], **quantization: Any) -> None:
    """Write tensors in place of a folder's, and say how they are quantized."""
    write_safetensors(folder, tensors.items())
    settings = {**read_json(folder / "config.json"), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(settings))


def draw_bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def test_mxfp4_is_that_of_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = draw_bytes(3, 8, 2, 16), draw_bytes(3, 8, 2, low=100, high=140)
    expected = mxfp4._convert_moe_packed_tensors(blocks, scales)
    unpacked = unpack_mxfp4(blocks, scales, torch.bfloat16)
    assert torch.equal(unpacked.mT, expected)


def test_a_folder_of_mxfp4_is_read_and_written_as_numbers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    tensors = write_folder(tmp_path / "published", "gpt_oss", **sizes)
    expected = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = draw_bytes(experts, rows, columns // 32, 16)
        scales = draw_bytes(experts, rows, columns // 32, low=120, high=130)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = unpack_mxfp4(blocks, scales, torch.bfloat16).mT
    quantize_folder(tmp_path / "published", tensors, quant_method="mxfp4")
    config, ours = read_model(tmp_path / "published")
    write_model(config, ours, tmp_path / "numbers", format="huggingface")
    assert "quantization_config" not in read_json(tmp_path / "numbers" / "config.json")
    written = dict(read_safetensors(tmp_path / "numbers"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_fp8_has_a_factor_for_each_block(tmp_path: Path) -> None:
    """The last blocks of a matrix may be cut."""
    tensors = write_folder(tmp_path / "published", "deepseek_v3")
    expected = dict(tensors)
    rows, columns = 6, 5
    names = [name for name in tensors if name.endswith("_proj.weight") or "kv_a_proj" in name]
    assert any(tensors[name].shape[0] % rows for name in names)
    for name in names:
        stored = tensors[name].float().mul(8).to(FP8)
        height, width = stored.shape
        factors = torch.rand(-(-height // rows), -(-width // columns)) + 0.5
        tensors |= {name: stored, f"{name}_scale_inv": factors}
        whole = torch.empty(stored.shape)
        for i in range(height):
            for j in range(width):
                whole[i, j] = stored[i, j].float() * factors[i // rows, j // columns]
        expected[name] = whole.bfloat16()
    block = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    quantize_folder(tmp_path / "published", tensors, **block)
    config, ours = read_model(tmp_path / "published")
    write_model(config, ours, tmp_path / "numbers", format="huggingface")
    written = dict(read_safetensors(tmp_path / "numbers"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)

    del tensors[f"{names[0]}_scale_inv"]
    quantize_folder(tmp_path / "published", tensors, **block)
    with pytest.raises(CheckpointError, match=r"_scale_inv is missing"):
        write_model(*read_model(tmp_path / "published"), tmp_path / "x", format="huggingface")


def test_stacked_matrices_have_factors_for_each_of_them() -> None:
    stored, factors = torch.ones(3, 4, 6).to(FP8), torch.arange(1.0, 19).view(3, 2, 3)
    theirs = Weights.wrap({"experts": stored, "experts_scale_inv": factors})
    block = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    numbers = dequantize(theirs, {"quantization_config": block, "dtype": "float32"})["experts"]
    assert torch.equal(numbers.unflatten(2, (3, 2))[:, ::2, :, 1], factors)
    assert torch.equal(numbers[:, ::2], numbers[:, 1::2])


@pytest.mark.parametrize(
    ("method", "tensors", "message"),
    [
        ("fp8", {"w": (4, 4), "w_scale_inv": (1, 1)}, r"w_scale_inv is \(1, 1\), not \(2, 2\)"),
        ("mxfp4", {"w_blocks": (1, 2, 1, 16)}, "w_scales is missing"),
        ("mxfp4", {"w_blocks": (1, 2, 1, 16), "w_scales": (1, 2)}, r"not \(1, 2, 1\)"),
    ],
)
def test_factors_that_do_not_fit_are_named(
    method: str, tensors: dict[str, tuple[int, ...]], message: str
) -> None:
    theirs = Weights.wrap({name: torch.ones(shape) for name, shape in tensors.items()})
    quantization = {"quant_method": method, "weight_block_size": [2, 2]}
    with pytest.raises(CheckpointError, match=message):
        dequantize(theirs, {"quantization_config": quantization})


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "awq"}, ["quantization_config.quant_method", "`awq`", "mxfp4 and fp8"]),
        ({"quant_method": "fp8"}, ["quantization_config.weight_block_size", "is required"]),
    ],
)
def test_other_methods_are_refused_by_name(
    quantization: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    tensors = write_folder(tmp_path / "published", "qwen3")
    quantize_folder(tmp_path / "published", tensors, **quantization)
    with pytest.raises(ConfigError) as raised:
        read_model(tmp_path / "published")
    assert not [word for word in words if word not in str(raised.value)]
