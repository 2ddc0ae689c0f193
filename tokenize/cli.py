"""`tokenize`: corpora in, token datasets out."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import click

from ..console import command

T = TypeVar("T")

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}

TOKENIZER_OPTIONS = {"byte": ("special", "dna", "masked_weight"), "bpe": ("end_of_document",)}
"""What belongs to one kind of tokenizer."""


@command.group("tokenize")
def main() -> None:
    """Turn any corpus into a token dataset."""


_on_error_option = click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What to do about bad records.",
)


def _source_options(function: Any) -> Any:
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


def _tokenizer_options(function: Any) -> Any:
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
        _on_error_option,
    ]
    return _apply(options, function)


def _engine_options(function: Any) -> Any:
    """What says where tasks run."""
    options = [
        click.option(
            "--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True
        ),
        click.option("--workers", type=int, help="local: processes; one for each core."),
        click.option("--address", help="ray: the cluster; one of this machine, if not given."),
    ]
    return _apply(options, function)


def _engine(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": values.pop("engine"),
        "workers": values.pop("workers"),
        "address": values.pop("address"),
    }


def _apply(options: list[Any], function: Any) -> Any:
    for option in reversed(options):
        function = option(function)
    return function


def _source(values: dict[str, Any]) -> dict[str, Any]:
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


def _checked(kind: type[T], data: dict[str, Any]) -> T:
    """The configuration that options make; options that cannot be are misuse."""
    from ..console.config import build
    from ..console.errors import ConfigError, MisuseError

    try:
        return build(kind, data, source="the command line")
    except ConfigError as error:
        raise MisuseError(error.what, mend=error.mend) from None


def _unescaped(option: str, text: str) -> str:
    """What a shell makes hard to write is written with a backslash; the rest stands for itself."""

    def letter(match: re.Match[str]) -> str:
        if match[1] not in ESCAPES:
            raise click.UsageError(
                f"{option} {text}: a backslash is followed by n, t, r, 0 or another backslash"
            )
        return ESCAPES[match[1]]

    return re.sub(r"\\(.?)", letter, text, flags=re.DOTALL)


@main.command()
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, help="Where the tokenizer's JSON goes.")
@click.option("--vocab-size", default=32768, show_default=True)
@click.option("--special", multiple=True, help="Special tokens; the first ends documents.")
@click.option("--sample", default="256Mi", show_default=True, help="Text to train on, in bytes.")
@_on_error_option
@_source_options
@command.json_option
def train(as_json: bool, **values: Any) -> None:
    """Train a byte-level BPE tokenizer on a sample of a corpus."""
    from ..console.config import count
    from .train import TrainConfig
    from .train import train as run

    data = {
        "source": _source(values),
        "inputs": values["inputs"],
        "out": values["out"],
        "vocab_size": values["vocab_size"],
        "sample_bytes": _bytes(values["sample"], count),
        "on_error": values["on_error"],
    }
    if values["special"]:
        data["special_tokens"] = values["special"]
    config = _checked(TrainConfig, data)
    tokenizer = run(config)
    if as_json:
        command.emit({"out": config.out, "vocab_size": tokenizer.get_vocab_size()})
        return
    command.say(f"{config.out}: {tokenizer.get_vocab_size()} tokens")


@main.command()
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, metavar="URL", help="Where the dataset goes.")
@click.option("--format", type=click.Choice(["arrow", "mds"]), default="arrow", show_default=True)
@click.option("--compression", metavar="zstd[:LEVEL]", help="MDS only.")
@click.option("--shard-size", default="64Mi", show_default=True, help="Bytes of tokens.")
@click.option("--split", multiple=True, metavar="NAME=SHARE", help="Hold documents out.")
@click.option("--shuffle", type=int, metavar="SEED", help="Shuffle documents across the build.")
@click.option("--dedup", type=click.Choice(["exact"]), help="Keep one of byte-equal documents.")
@click.option("--max-document-tokens", type=int, metavar="N", help="Split what is longer.")
@click.option("--rehash", is_flag=True, help="Hash all inputs, also those that seem unchanged.")
@_tokenizer_options
@_source_options
@_engine_options
@command.json_option
def build(as_json: bool, **values: Any) -> None:
    """Build a dataset, or add files to it."""
    from .build import build as run

    config = _build_config(values)
    made = run(config)
    if as_json:
        from .inspect import summary

        command.emit([summary(url) for url in made])
        return
    for url, found in made.items():
        command.say(f"{url}: {found.documents:,} documents, {found.tokens:,} tokens")


def _build_config(values: dict[str, Any]) -> Any:
    from ..console.config import count
    from .build import BuildConfig

    splits = _splits(values.pop("split", ()))
    if "shard_size" in values:
        values["shard_size"] = _bytes(values["shard_size"], count)
    data = {
        "source": _source(values),
        **_tokenizer(values),
        "splits": splits,
        "engine": _engine(values),
        **values,
    }
    return _checked(BuildConfig, data)


def _splits(words: tuple[str, ...]) -> dict[str, float]:
    from .build import check_splits

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


@main.command()
@click.argument("url")
@click.option("--format", type=click.Choice(["auto", "mds", "arrow", "megatron"]), default="auto")
@click.option("--column", help="mds, arrow: what holds the ids (tokens).")
@click.option("--dtype", help="mds: the ids' type, where the column does not tell it.")
@click.option("--tokenizer", metavar="byte|FILE", help="So that ids can be shown as text.")
@click.option("--end-of-document", metavar="TOKEN", help="FILE: what ends every document.")
@click.option("--end-id", metavar="ID|none", help="The same as an id; none: nothing does.")
@_engine_options
@command.json_option
def index(as_json: bool, **values: Any) -> None:
    """Make a manifest for a dataset that others have written, without copying it."""
    from .index import IndexConfig
    from .index import index as run

    if values["end_of_document"] and values["tokenizer"] in (None, "byte"):
        raise click.UsageError("--end-of-document is for a tokenizer.json only")
    if (end := values["end_id"]) not in (None, "none"):
        if not end.isdecimal():
            raise click.UsageError(f"--end-id {end}: an id, or none")
        values["end_id"] = int(end)
    data = {"engine": _engine(values), **values}
    made = run(_checked(IndexConfig, data))
    if as_json:
        from .inspect import summary

        command.emit(summary(values["url"]))
        return
    command.say(f"{values['url']}: {made.documents:,} documents, {made.tokens:,} tokens")


@main.command()
@click.argument("inputs", nargs=-1, required=True)
@click.option("--sample", type=float, default=1.0, metavar="SHARE", help="Tokenize only so much.")
@_tokenizer_options
@_source_options
@_engine_options
@command.json_option
def count(sample: float, as_json: bool, **values: Any) -> None:
    """Count the tokens of a corpus, without writing anything."""
    from .count import as_data, describe
    from .count import count as run

    if not 0 < sample <= 1:
        raise click.UsageError("--sample is a share: more than 0, at most 1")
    counts = run(_build_config({**values, "out": "nowhere"}), sample)
    if as_json:
        command.emit(as_data(counts))
    else:
        click.echo(describe(counts))


@main.command()
@click.argument("url")
@click.option("--document", "number", type=int, metavar="N", help="Show this document as text.")
@click.option("--documents", default=0, metavar="N", help="Show the first N documents.")
@command.json_option
def inspect(url: str, number: int | None, documents: int, as_json: bool) -> None:
    """Show what a dataset is, what it came from, and what its documents say."""
    from . import inspect as look

    numbers = range(documents) if number is None else [number]
    if as_json:
        shown = []
        for k in numbers:
            origin, ids = look.document(url, k)
            shown.append({"origin": vars(origin), "ids": ids, "text": look.text(url, ids)})
        command.emit({**look.summary(url), "shown": shown})
        return
    if number is None:
        click.echo(look.describe(url))
    for k in numbers:
        origin, ids = look.document(url, k)
        name = f", id {origin.id}" if origin.id else ""
        click.echo(f"\n--- document {k}: {len(ids)} tokens, {origin.file}:{origin.position}{name}")
        click.echo(look.text(url, ids))


@main.command()
@click.argument("url")
@_engine_options
@command.json_option
def verify(url: str, as_json: bool, **values: Any) -> None:
    """Check every byte and every count of a dataset."""
    from ..console.errors import IntegrityError
    from ..dataplane import manifest
    from .engines import EngineConfig
    from .verify import Damage, describe
    from .verify import verify as run

    config = _checked(EngineConfig, _engine(values))
    try:
        damage = run(url, config)
    except IntegrityError as error:  # the manifest itself, or a table
        if as_json:
            command.emit([vars(Damage(manifest.NAME, error.what, ""))])
        raise
    if as_json:
        command.emit([vars(one) for one in damage])
    if damage:
        raise IntegrityError(
            describe(url, damage),
            mend=("remove these files and run the build's command again: only their tasks are run"),
        )
    command.say(f"{url} is whole")


def _bytes(text: str, count: Any) -> int:
    """A size such as 64Mi."""
    if text.isdigit():
        return int(text)
    try:
        return int(count(text))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


if __name__ == "__main__":
    main()
