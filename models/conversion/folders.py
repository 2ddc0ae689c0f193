"""A model in a folder, whoever's: read it and write it, in any of the formats.

headrace      model.yaml   and safetensors by our names
huggingface   config.json  and safetensors, as transformers saves and loads them
vortex        config.yml   and model.pt: StripedHyena 2
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...console.errors import StorageError, UserError
from ..config import ModelConfig
from ..weights import Weights
from . import huggingface, native, vortex
from .files import staged
from .rules import Tensors

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
    """One way to keep a model in a folder."""

    mark: str
    """The file by which a folder is known."""
    read: Callable[[Path], tuple[ModelConfig, Weights]]
    write: Callable[[ModelConfig, Tensors, Path], str]
    """Returns what was written, in a word: the family, say."""


FORMATS = {
    "headrace": FolderFormat(native.CONFIG, native.read, native.write),
    "huggingface": FolderFormat(huggingface.CONFIG, huggingface.read, huggingface.write),
    "vortex": FolderFormat(vortex.CONFIG, vortex.read, vortex.write),
}


def read_model(folder: str | Path) -> tuple[ModelConfig, Weights]:
    """A model's configuration, and its tensors by our names, each read when it is asked for.

    Everything is checked before: that no tensor is missing or left over, and every shape.
    """
    folder = Path(folder)
    return FORMATS[format_of(folder)].read(folder)


def write_model(
    config: ModelConfig,
    tensors: Tensors,
    folder: str | Path,
    *,
    format: str,
    tokenizer: str | Path | None = None,
) -> str:
    """Write a folder that is not there yet; it appears when it is whole.

    `tokenizer` is a folder whose tokenizer files are copied. Returns what was written, in a word.
    """
    if tokenizer is not None and not tokenizer_files(tokenizer):
        raise StorageError(
            f"there is no tokenizer in {tokenizer}",
            hint=f"name a folder that holds {', '.join(TOKENIZER_FILES[:2])} or the like",
        )
    held = tensors if isinstance(tensors, Weights) else Weights.held(tensors)
    fitting = native.fitting(config, held, source="the model")
    with staged(Path(folder)) as partial:
        written = FORMATS[format].write(config, fitting, partial)
        for file in tokenizer_files(tokenizer) if tokenizer is not None else ():
            shutil.copyfile(file, partial / file.name)
    return written


def convert(
    source: str | Path, folder: str | Path, *, format: str, tokenizer: str | Path | None = None
) -> str:
    """From one folder to another. A tokenizer in the source goes along."""
    config, tensors = read_model(source)
    if tokenizer is None and tokenizer_files(source):
        tokenizer = source
    return write_model(config, tensors, folder, format=format, tokenizer=tokenizer)


def format_of(folder: Path) -> str:
    """Whose folder it is."""
    found = [name for name, format in FORMATS.items() if (folder / format.mark).is_file()]
    marks = ", ".join(f"{format.mark} ({name})" for name, format in FORMATS.items())
    if not found:
        what = "holds no model" if folder.is_dir() else "is no folder"
        raise StorageError(f"{folder} {what}", hint=f"name a folder with one of {marks}")
    if len(found) > 1:
        raise UserError(f"{folder} holds several models: {', '.join(found)}")
    return found[0]


def tokenizer_files(folder: str | Path) -> list[Path]:
    return [file for name in TOKENIZER_FILES if (file := Path(folder) / name).is_file()]
