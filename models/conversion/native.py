"""headrace folders: `model.yaml`, and safetensors with our names."""

from __future__ import annotations

from pathlib import Path

from ...console import config as reader
from ..accounting.count import build_meta
from ..config.config import ModelConfig, load_model_config
from ..weights import Weights
from .files import read_safetensors, write_safetensors
from .rules import Rule, Tensors, export_tensors, import_tensors, map_same

CONFIG = "model.yaml"


def read(folder: Path) -> tuple[ModelConfig, Weights]:
    config = load_model_config(folder / CONFIG)
    return config, check_fit(config, read_safetensors(folder), source=str(folder))


def write(config: ModelConfig, tensors: Tensors, folder: Path) -> str:
    write_safetensors(folder, export_tensors(rules(config), tensors))
    (folder / CONFIG).write_text(reader.dump(config), encoding="utf-8")
    return "headrace"


def check_fit(config: ModelConfig, tensors: Weights, *, source: str) -> Weights:
    """Return the same tensors; raise unless this model has the same names and shapes."""
    return import_tensors(rules(config), tensors, config, source=source)


def rules(config: ModelConfig) -> list[Rule]:
    return [map_same(name, name) for name, _ in build_meta(config).named_parameters()]
