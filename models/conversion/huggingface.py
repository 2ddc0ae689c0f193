"""Folders of transformers: config.json, safetensors, and a tokenizer that is copied along."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...console.errors import CheckpointError, ConfigError, Problem, Problems, StorageError
from ..config import ModelConfig
from ..count import build_meta
from . import FAMILIES
from .family import Unsuitable
from .rules import Tensors, to_ours, to_theirs

INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)

WHOLE = "name a folder as transformers saves it, whole: config.json and every .safetensors file"


def read_folder(folder: str | Path) -> tuple[ModelConfig, Tensors]:
    """A model's configuration and its tensors, by our names."""
    folder = Path(folder)
    settings = read_json(folder / "config.json")
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        problem = Problem("model_type", f"`{kind}` cannot be converted; known: {known}")
        raise ConfigError(str(folder / "config.json"), [problem])
    family = FAMILIES[str(kind)]
    try:
        config = family.read(settings)
    except KeyError as error:
        problem = Problem(str(error.args[0]), "is required")
        raise ConfigError(str(folder / "config.json"), [problem]) from None
    except Problems as error:
        raise ConfigError(str(folder / "config.json"), error.problems) from None
    except ValueError as error:
        raise ConfigError(str(folder / "config.json"), [Problem("", str(error))]) from None
    except (TypeError, AttributeError) as error:
        raise ConfigError(str(folder / "config.json"), _wrong_types(settings, error)) from None
    tensors = from_huggingface(str(kind), config, read_tensors(folder), source=str(folder))
    return config, tensors


def _wrong_types(settings: Mapping[str, Any], error: Exception) -> list[Problem]:
    """What makes reading the settings stumble over a type: numbers in quotes, most often."""
    return [
        Problem(name, f"should be a number, not the text {value!r}")
        for name, value in settings.items()
        if isinstance(value, str) and value.replace(".", "", 1).isdigit()
    ] or [Problem("", f"a value is of the wrong type: {error}")]


def write_folder(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    *,
    family: str | None = None,
    tokenizer: str | Path | None = None,
) -> str:
    """Write what transformers loads; the family that was written.

    `tokenizer` is a folder whose tokenizer files are copied.
    """
    folder = Path(folder)
    name, settings = suitable(config, family)
    theirs = to_theirs(FAMILIES[name].rules(config), tensors)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in theirs.values()}
    if len(dtypes) == 1:
        settings["torch_dtype"] = dtypes.pop()
    settings["architectures"] = [FAMILIES[name].architecture]
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, theirs)
    if tokenizer is not None:
        copy_tokenizer(Path(tokenizer), folder)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return name


def suitable(config: ModelConfig, family: str | None = None) -> tuple[str, dict[str, Any]]:
    """The family that can say this model, and its `config.json`."""
    if family is not None and family not in FAMILIES:
        raise ConfigError(
            "the family", [Problem(family, f"is not known: {', '.join(sorted(FAMILIES))}")]
        )
    reasons = []
    for name in [family] if family is not None else FAMILIES:
        try:
            return name, FAMILIES[name].write(config)
        except Unsuitable as error:
            reasons.append(f"{name}: {error}")
    listed = "\n  ".join(reasons)
    raise CheckpointError(
        f"no family of transformers can say this model\n  {listed}",
        mend="export it to our own format, or change the model",
    )


def from_huggingface(
    family: str, config: ModelConfig, tensors: Mapping[str, Tensor], *, source: str
) -> Tensors:
    """Tensors by our names from tensors by theirs."""
    shapes = {name: tensor.shape for name, tensor in build_meta(config).named_parameters()}
    tied = config.tie_embeddings

    def ignored(name: str) -> bool:
        # Rotary frequencies are computed; tied weights may be written once more.
        again = ".shared_transf" in name
        return name.endswith("rotary_emb.inv_freq") or again or (tied and name == "lm_head.weight")

    rules = FAMILIES[family].rules(config)
    return to_ours(rules, tensors, shapes, ignored=ignored, source=source)


def read_tensors(folder: Path) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / INDEX
    if index.exists():
        files = sorted(set(read_json(index)["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    tensors: Tensors = {}
    for file in files:
        try:
            tensors.update(load_file(folder / file))
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"cannot read {folder / file}: {error}",
                mend=WHOLE,
            ) from None
    return tensors


def write_tensors(folder: Path, tensors: Tensors, file_bytes: int = FILE_BYTES) -> None:
    """One file, or several and an index where one would be too large."""
    from safetensors.torch import save_file

    groups: list[Tensors] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > file_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    if len(groups) == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    places = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(group, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    found = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise StorageError(
            f"there is no tokenizer in {source}",
            mend=f"name a folder that holds {', '.join(TOKENIZER_FILES[:2])} or the like",
        )
    for file in found:
        shutil.copyfile(file, folder / file.name)


def read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {file}: {error}", mend=WHOLE) from None
    if not isinstance(data, dict):
        raise StorageError(f"{file} is not a JSON object", mend=WHOLE)
    return data
