"""What `tokenize` can be asked on the command line, and the configuration that it comes to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from .build.build import BuildConfig

T = TypeVar("T")

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}

TOKENIZER_OPTIONS = {"byte": ("special", "dna", "masked_weight"), "bpe": ("end_of_document",)}
"""What belongs to one kind of tokenizer."""

on_error_option = click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What to do about bad records.",
)


def source_options(function: Any) -> Any:
    """What says how a corpus is read."""
    options = [
        click.option(
            "--input-format",
            default="auto",
            show_default=True,
            metavar="KIND",
            help="jsonl, parquet, arrow, text, fasta; auto goes by the files' endings.",
        ),
        click.option("--text-field", help="What holds a text (text)."),
        click.option("--id-field", help="What holds the corpus' own id of a document."),
        click.option(
            "--text-documents",
            type=click.Choice(["file", "line", "separator"]),
            help="What one document of a plain text is (file).",
        ),
        click.option("--separator", help="Between the documents of a plain text (\\n\\n)."),
    ]
    return _apply(options, function)


def tokenizer_options(function: Any) -> Any:
    """What says how texts become ids."""
    options = [
        click.option("--tokenizer", required=True, metavar="byte|FILE", help="Or tokenizer.json."),
        click.option("--dna", is_flag=True, help="byte: lower-case bases weigh less in the loss."),
        click.option("--masked-weight", type=float, help="--dna: how much (0.1)."),
        click.option(
            "--special", multiple=True, help="byte: special tokens; the first is the end."
        ),
        click.option("--end-of-document", metavar="TOKEN", help="FILE: what ends a document."),
        click.option("--parse-special", is_flag=True, help="Special tokens in a text are no text."),
        on_error_option,
    ]
    return _apply(options, function)


def engine_options(function: Any) -> Any:
    """What says where tasks run."""
    options = [
        click.option(
            "--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True
        ),
        click.option("--workers", type=int, help="local: processes; one for each core."),
        click.option("--address", help="ray: the cluster; one of this machine, if not given."),
    ]
    return _apply(options, function)


def engine_of(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": values.pop("engine"),
        "workers": values.pop("workers"),
        "address": values.pop("address"),
    }


def _apply(options: list[Any], function: Any) -> Any:
    for option in reversed(options):
        function = option(function)
    return function


def source_of(values: dict[str, Any]) -> dict[str, Any]:
    separator = values.pop("separator")
    given = {name: values.pop(name) for name in ("text_field", "id_field", "text_documents")}
    if separator is not None:
        if given["text_documents"] != "separator":
            raise click.UsageError("--separator needs --text-documents separator")
        given["separator"] = _unescaped("--separator", separator)
    return {
        "format": values.pop("input_format"),
        **{name: value for name, value in given.items() if value is not None},
    }


def _tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer and its settings. An option of the other kind would change nothing."""
    kind = "byte" if values["tokenizer"] == "byte" else "bpe"
    settings: dict[str, dict[str, Any]] = {"byte": {}, "bpe": {}}
    for owner, names in TOKENIZER_OPTIONS.items():
        for name in names:
            value = values.pop(name)
            if value is None or value is False or value == ():
                continue
            if owner != kind:
                meant = "--tokenizer byte" if owner == "byte" else "a tokenizer.json"
                raise click.UsageError(f"--{name.replace('_', '-')} is for {meant} only")
            settings[owner]["special_tokens" if name == "special" else name] = value
    if "masked_weight" in settings["byte"] and "dna" not in settings["byte"]:
        raise click.UsageError("--masked-weight needs --dna")
    settings[kind]["parse_special"] = values.pop("parse_special")
    return {"tokenizer": values.pop("tokenizer"), kind: settings[kind]}


def checked(kind: type[T], data: dict[str, Any]) -> T:
    """The configuration that options make; options that cannot be are misuse."""
    from ..console.config import build
    from ..console.errors import ConfigError, MisuseError

    try:
        return build(kind, data, source="the command line")
    except ConfigError as error:
        raise MisuseError(error.what, hint=error.hint) from None


def _unescaped(option: str, text: str) -> str:
    """What a shell makes hard to write is written with a backslash; the rest stands for itself."""

    def letter(match: re.Match[str]) -> str:
        if match[1] not in ESCAPES:
            raise click.UsageError(
                f"{option} {text}: a backslash is followed by n, t, r, 0 or another backslash"
            )
        return ESCAPES[match[1]]

    return re.sub(r"\\(.?)", letter, text, flags=re.DOTALL)


def build_config(values: dict[str, Any]) -> BuildConfig:
    """What `build` is asked; `count` knows fewer options."""
    from .build.build import BuildConfig

    splits = _splits(values.pop("split", ()))
    if "shard_size" in values:
        values["shard_size"] = bytes_of(values["shard_size"], "--shard-size")
    data = {
        "source": source_of(values),
        **_tokenizer(values),
        "splits": splits,
        "engine": engine_of(values),
        **values,
    }
    return checked(BuildConfig, data)


def _splits(words: tuple[str, ...]) -> dict[str, float]:
    from .build.build import check_splits

    splits: dict[str, float] = {}
    for word in words:
        name, _, share = word.partition("=")
        try:
            number = float(share)
        except ValueError:
            raise click.UsageError(f"--split {word}: written NAME=SHARE, as in val=0.001") from None
        if name in splits:
            raise click.UsageError(f"--split {word}: `{name}` has its share already")
        splits[name] = number
    try:
        check_splits(splits)
    except ValueError as error:
        raise click.UsageError(f"--split: {error}") from None
    return splits


def bytes_of(text: str, option: str) -> int:
    """A size such as 64Mi."""
    from ..console.config import count

    if text.isdigit():
        return int(text)
    try:
        return int(count(text))
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from None
