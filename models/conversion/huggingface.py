"""Folders of transformers: config.json and safetensors.

Folders with `.bin` files of torch, and those of mamba_ssm and BlackMamba, which lack `model_type`,
are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...console.errors import CheckpointError, ConfigError, ConfigProblem
from ..config.config import ModelConfig
from ..weights import Weights
from . import FAMILIES, ORIGINALS
from .family import Original, Unsuitable, settings_errors
from .files import read_json, read_weights, write_json, write_safetensors
from .rules import Tensors, export_tensors, import_tensors

CONFIG = "config.json"


def read(folder: Path) -> tuple[ModelConfig, Weights]:
    """Return a model's configuration and its tensors, by our names."""
    settings = read_json(folder / CONFIG)
    family = find_family(settings, folder / CONFIG)
    with settings_errors(folder / CONFIG, settings):
        config = family.read(settings)

    def ignored(name: str) -> bool:
        # Rotary frequencies are computed; a tied head may be written too.
        tied = config.tie_embeddings and name in ("lm_head.weight", "output_layer.weight")
        return tied or name.endswith("rotary_emb.inv_freq")

    theirs = read_weights(folder)
    return config, import_tensors(
        family.rules(config), theirs, config, source=str(folder), ignored=ignored
    )


def find_family(settings: Mapping[str, Any], file: Path) -> Original:
    """Return the family that `model_type` names, or the format that has these keys."""
    kind = settings.get("model_type")
    if kind is None:
        for key, original in ORIGINALS.items():
            if key in settings:
                return original
    if kind in FAMILIES:
        return FAMILIES[str(kind)]
    known = ", ".join(sorted(FAMILIES))
    if kind is None:
        keys = " or ".join(f"`{key}`" for key in ORIGINALS)
        message = f"is missing, and so is {keys}; known: {known}, and the formats with these keys"
    else:
        message = f"`{kind}` cannot be converted; known: {known}"
    raise ConfigError(str(file), [ConfigProblem("model_type", message)])


def write(config: ModelConfig, tensors: Tensors, folder: Path) -> str:
    """Write a folder that transformers loads; return the family."""
    name, settings = choose_family(config)
    family = FAMILIES[name]
    dtypes = write_safetensors(folder, export_tensors(family.rules(config), tensors))
    if len(dtypes) == 1:
        settings["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    settings["architectures"] = [family.architecture]
    write_json(folder / CONFIG, settings)
    return name


def choose_family(config: ModelConfig) -> tuple[str, dict[str, Any]]:
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
