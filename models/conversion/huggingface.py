"""Folders of transformers: config.json and safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...console.errors import CheckpointError, ConfigError, Problem
from ..config import ModelConfig
from ..weights import Weights
from . import FAMILIES
from .family import Unsuitable, settings_errors
from .files import read_json, read_safetensors, write_json, write_safetensors
from .rules import Tensors, to_ours, to_theirs

CONFIG = "config.json"


def read(folder: Path) -> tuple[ModelConfig, Weights]:
    """Return a model's configuration and its tensors, by our names."""
    settings = read_json(folder / CONFIG)
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        problem = Problem("model_type", f"`{kind}` cannot be converted; known: {known}")
        raise ConfigError(str(folder / CONFIG), [problem])
    family = FAMILIES[str(kind)]
    with settings_errors(folder / CONFIG, settings):
        config = family.read(settings)

    def ignored(name: str) -> bool:
        # Rotary frequencies are computed; tied and shared weights may be written twice.
        tied = config.tie_embeddings and name == "lm_head.weight"
        return tied or name.endswith("rotary_emb.inv_freq") or ".shared_transf" in name

    theirs = read_safetensors(folder)
    return config, to_ours(
        family.rules(config), theirs, config, source=str(folder), ignored=ignored
    )


def write(config: ModelConfig, tensors: Tensors, folder: Path) -> str:
    """Write a folder that transformers loads; return the family."""
    name, settings = suitable(config)
    family = FAMILIES[name]
    dtypes = write_safetensors(folder, to_theirs(family.rules(config), tensors))
    if len(dtypes) == 1:
        settings["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    settings["architectures"] = [family.architecture]
    write_json(folder / CONFIG, settings)
    return name


def suitable(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Return the family that can represent this model, and its `config.json`."""
    reasons = []
    for name, family in FAMILIES.items():
        try:
            return name, family.write(config)
        except Unsuitable as error:
            reasons.append(f"{name}: {error}")
    listed = "\n  ".join(reasons)
    raise CheckpointError(
        f"no family of transformers can represent this model\n  {listed}",
        hint="use --format headrace, or change the model",
    )
