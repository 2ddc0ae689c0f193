"""Model folders: read, write and convert any format.

headrace      model.yaml   and safetensors with our names
huggingface   config.json  and safetensors, as transformers writes them
vortex        config.yml   and model.pt: StripedHyena 2
savanna       mp_rank_00_model_states.pt and configs/: read only
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...console.errors import StorageError, UserError
from ...console.explain import path_hint
from ..config.config import ModelConfig
from ..weights import Weights
from . import huggingface, native, vortex
from .files import stage_folder
from .rules import Tensors
from .savanna import checkpoint as savanna

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class FolderFormat:
    """Model folder format."""

    mark_file: str
    """File that identifies the format."""
    read: Callable[[Path], tuple[ModelConfig, Weights]]
    write: Callable[[ModelConfig, Tensors, Path], str]
    """Write a model; return the written variant, such as the family."""
    write_family: Callable[[ModelConfig, Tensors, Path, str], str] | None = None
    """Write a model as one of several families."""


FORMATS = {
    "headrace": FolderFormat(native.CONFIG, native.read, native.write),
    "huggingface": FolderFormat(
        huggingface.CONFIG, huggingface.read, huggingface.write, huggingface.write
    ),
    "vortex": FolderFormat(vortex.CONFIG, vortex.read, vortex.write),
}
"""Formats that are read and written."""
MARK_FILES = {name: format.mark_file for name, format in FORMATS.items()}
MARK_FILES |= {"savanna": savanna.FIRST}
READERS = {**{name: format.read for name, format in FORMATS.items()}, "savanna": savanna.read}


def read_model(folder: str | Path) -> tuple[ModelConfig, Weights]:
    """Return a model's configuration and lazily read tensors, by our names.

    Missing tensors, unknown tensors and shapes are checked first.
    """
    folder = Path(folder)
    return READERS[find_format(folder)](folder)


def write_model(
    config: ModelConfig,
    tensors: Tensors,
    folder: str | Path,
    *,
    format: str,
    tokenizer: str | Path | None = None,
    family: str | None = None,
) -> str:
    """Write a new folder, which appears only when it is complete.

    `tokenizer` is a folder whose tokenizer files are copied, and the ids of special tokens in its
    config.json. `family` is one of the format's; by
    default, the first that can represent the model. Return the written variant.
    """
    if tokenizer is not None and not list_tokenizer_files(tokenizer):
        raise StorageError(
            f"there is no tokenizer in {tokenizer}",
            hint=f"name a folder with {' or '.join(TOKENIZER_FILES[:2])}",
        )
    weights = tensors if isinstance(tensors, Weights) else Weights.wrap(tensors)
    fitted = native.check_fit(config, weights, source="the model")
    with stage_folder(Path(folder)) as partial:
        writer = FORMATS[format]
        if family is None:
            variant = writer.write(config, fitted, partial)
        elif writer.write_family is not None:
            variant = writer.write_family(config, fitted, partial, family)
        else:
            raise UserError(f"the format {format} has no families", hint="leave out the family")
        for file in list_tokenizer_files(tokenizer) if tokenizer is not None else ():
            shutil.copyfile(file, partial / file.name)
        if tokenizer is not None and format == "huggingface":
            huggingface.copy_ids(Path(tokenizer), partial)
    return variant


def convert(
    source: str | Path,
    folder: str | Path,
    *,
    format: str,
    tokenizer: str | Path | None = None,
    family: str | None = None,
) -> str:
    """Convert a model folder to another format. A tokenizer in the source is copied. A folder of
    transformers stays of its family, if `family` names no other."""
    config, tensors = read_model(source)
    if tokenizer is None and list_tokenizer_files(source):
        tokenizer = source
    if family is None and format == "huggingface" == find_format(Path(source)):
        family = huggingface.find_model_type(Path(source))
    return write_model(config, tensors, folder, format=format, tokenizer=tokenizer, family=family)


def find_format(folder: Path) -> str:
    """Detect a folder's format."""
    formats = [name for name, mark in MARK_FILES.items() if (folder / mark).is_file()]
    mark_files = ", ".join(f"{mark} ({name})" for name, mark in MARK_FILES.items())
    if not formats:
        fault = "holds no model" if folder.is_dir() else "is not a folder"
        hint = path_hint(folder, f"name a folder with one of {mark_files}")
        raise StorageError(f"{folder} {fault}", hint=hint)
    if len(formats) > 1:
        raise UserError(
            f"{folder} holds several models: {', '.join(formats)}",
            hint="name a folder with one of them",
        )
    return formats[0]


def list_tokenizer_files(folder: str | Path) -> list[Path]:
    return [file for name in TOKENIZER_FILES if (file := Path(folder) / name).is_file()]
