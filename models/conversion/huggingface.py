"""Read and write folders of transformers: config.json and safetensors.

Also read: the text models of multimodal folders; folders with torch's `.bin` files, and those of
mamba_ssm and BlackMamba, whose config.json has no `model_type`, and of StripedHyena 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...console.errors import CheckpointError, ConfigError, ConfigProblem
from ...console.log import get_logger
from ..config.config import ModelConfig
from ..weights import Weights
from . import FAMILIES, ORIGINALS
from .family import Original, Unsuitable, settings_errors
from .files import read_json, read_weights, write_json, write_safetensors
from .keys import NO_IDS
from .multimodal import select_text_settings, select_text_weights
from .quantized import dequantize
from .rules import Tensors, export_tensors, import_tensors

CONFIG = "config.json"
HEADS = ("lm_head.weight", "output_layer.weight", "unembed.weight")

log = get_logger(__name__)


def read(folder: Path) -> tuple[ModelConfig, Weights]:
    """Return a model's configuration, and its tensors by our names, read when they are asked for.

    Raise ConfigError for a configuration that we do not support, CheckpointError for tensors that
    do not fit it.
    """
    outer = read_json(folder / CONFIG)
    settings = select_text_settings(outer)
    family = find_family(settings, folder / CONFIG)
    with settings_errors(folder / CONFIG, settings):
        config = family.read(settings)
        stored = select_text_weights(read_weights(folder), outer, source=str(folder))
        theirs = dequantize(stored, settings)
    first, extra = len(config.layers), settings.get("num_nextn_predict_layers") or 0
    # Heads that predict further tokens (Qwen3-Next), or layers that do (DeepSeek V3).
    predicting = ("mtp.", *(f"model.layers.{number}." for number in range(first, first + extra)))
    num_skipped = sum(name.startswith(predicting) for name in theirs)
    if num_skipped:
        message = "%s: what predicts tokens after the next is left out (%d tensors)"
        log.warning(message, folder, num_skipped)

    def is_ignored(name: str) -> bool:
        # We compute rotary frequencies. A tied head is the embedding, which has a name of its own.
        is_tied = config.tie_embeddings and name.endswith(HEADS)
        return is_tied or name.endswith("rotary_emb.inv_freq") or name.startswith(predicting)

    return config, import_tensors(
        family.rules(config), theirs, config, source=str(folder), is_ignored=is_ignored
    )


def find_family(settings: Mapping[str, Any], file: Path) -> Original:
    """Return the family that `model_type` names; else the original format whose key the settings
    have. Raise ConfigError, which names `file`, if neither is known."""
    model_type = settings.get("model_type")
    if model_type in FAMILIES:
        return FAMILIES[str(model_type)]
    for key, select_layout in ORIGINALS.items():
        if key in settings:
            with settings_errors(file, settings):
                return select_layout(settings)
    known = ", ".join(sorted(FAMILIES))
    if model_type is None:
        keys = " or ".join(f"`{key}`" for key in ORIGINALS)
        message = f"is missing, and so is {keys}; known: {known}, and the formats with these keys"
    else:
        message = f"`{model_type}` cannot be converted; known: {known}"
    raise ConfigError(str(file), [ConfigProblem("model_type", message)])


def write(
    config: ModelConfig, tensors: Tensors, folder: Path, family_name: str | None = None
) -> str:
    """Write a folder that transformers loads; return the family's name."""
    name, settings = choose_family(config, family_name)
    family = FAMILIES[name]
    dtypes = write_safetensors(folder, export_tensors(family.rules(config), tensors))
    if len(dtypes) == 1:
        settings["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    settings["architectures"] = [family.architecture]
    write_json(folder / CONFIG, settings)
    return name


def copy_ids(tokenizer: Path, folder: Path) -> None:
    """Let a written folder name the special tokens that a tokenizer's configuration names."""
    if not (tokenizer / CONFIG).is_file():
        return
    stored = select_text_settings(read_json(tokenizer / CONFIG))
    ids = {key: stored[key] for key in NO_IDS if stored.get(key) is not None}
    if ids:
        write_json(folder / CONFIG, {**read_json(folder / CONFIG), **ids})


def find_model_type(folder: Path) -> str | None:
    """Return the family of a folder, if it can be written too."""
    model_type = select_text_settings(read_json(folder / CONFIG)).get("model_type")
    return model_type if model_type in FAMILIES else None


def choose_family(config: ModelConfig, name: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return the first family that can represent this model: its name, and the settings for
    `config.json`. A `name` is the only candidate. Raise CheckpointError with the reasons of all
    candidates if none can."""
    reasons = []
    candidates = FAMILIES if name is None else {name: FAMILIES[name]}
    for name, family in candidates.items():
        try:
            return name, family.write(config)
        except Unsuitable as error:
            reasons.append(f"{name}: {error}")
    raise CheckpointError(
        "no family of transformers can represent this model\n  " + "\n  ".join(reasons),
        hint="use --format headrace, or change the model",
    )
