"""`tokenize`: corpora in, token datasets out."""

from __future__ import annotations

from typing import Any

import click

from ..console import command
from ..dataplane.shards import FORMATS, writable_formats
from . import options


@command.group("tokenize")
def main() -> None:
    """Turn any corpus into a token dataset."""


@main.command()
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, help="Where the tokenizer's JSON goes.")
@click.option("--vocab-size", default=32768, show_default=True)
@click.option("--special", multiple=True, help="Special tokens; the first ends documents.")
@click.option("--sample", default="256Mi", show_default=True, help="Text to train on, in bytes.")
@options.on_error_option
@options.source_options
@command.json_option
def train(as_json: bool, **values: Any) -> None:
    """Train a byte-level BPE tokenizer on a sample of a corpus."""
    from .train import TrainConfig
    from .train import train as run

    data = {
        "source": options.source_of(values),
        "inputs": values["inputs"],
        "out": values["out"],
        "vocab_size": values["vocab_size"],
        "sample_bytes": options.bytes_of(values["sample"], "--sample"),
        "on_error": values["on_error"],
    }
    if values["special"]:
        data["special_tokens"] = values["special"]
    config = options.checked(TrainConfig, data)
    tokenizer = run(config)
    if as_json:
        command.emit({"out": config.out, "vocab_size": tokenizer.get_vocab_size()})
        return
    command.say(f"{config.out}: {tokenizer.get_vocab_size()} tokens")


@main.command()
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, metavar="URL", help="Where the dataset goes.")
@click.option("--format", type=click.Choice(writable_formats()), default="arrow", show_default=True)
@click.option(
    "--compression", metavar="zstd[:LEVEL]", help="For formats that can be compressed (mds)."
)
@click.option("--shard-size", default="64Mi", show_default=True, help="Bytes of tokens.")
@click.option("--split", multiple=True, metavar="NAME=SHARE", help="Hold documents out.")
@click.option("--shuffle", type=int, metavar="SEED", help="Shuffle documents across the build.")
@click.option("--dedup", type=click.Choice(["exact"]), help="Keep one of byte-equal documents.")
@click.option("--max-document-tokens", type=int, metavar="N", help="Split what is longer.")
@click.option("--rehash", is_flag=True, help="Hash all inputs, also those that seem unchanged.")
@options.tokenizer_options
@options.source_options
@options.engine_options
@command.json_option
def build(as_json: bool, **values: Any) -> None:
    """Build a dataset, or add files to it."""
    from .build.build import build as run

    config = options.build_config(values)
    made = run(config)
    if as_json:
        from .inspect import summary

        command.emit([summary(url) for url in made])
        return
    for url, found in made.items():
        command.say(f"{url}: {found.documents:,} documents, {found.tokens:,} tokens")


@main.command()
@click.argument("url")
@click.option("--format", type=click.Choice(["auto", *FORMATS]), default="auto")
@click.option("--column", help="Column that holds the ids, in formats with columns (tokens).")
@click.option("--dtype", help="Type of the ids, where the format does not record it.")
@click.option("--tokenizer", metavar="byte|FILE", help="So that ids can be shown as text.")
@click.option("--end-of-document", metavar="TOKEN", help="FILE: what ends every document.")
@click.option("--end-id", metavar="ID|none", help="The same as an id; none: nothing does.")
@options.engine_options
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
    data = {"engine": options.engine_of(values), **values}
    made = run(options.checked(IndexConfig, data))
    if as_json:
        from .inspect import summary

        command.emit(summary(values["url"]))
        return
    command.say(f"{values['url']}: {made.documents:,} documents, {made.tokens:,} tokens")


@main.command()
@click.argument("inputs", nargs=-1, required=True)
@click.option("--sample", type=float, default=1.0, metavar="SHARE", help="Tokenize only so much.")
@options.tokenizer_options
@options.source_options
@options.engine_options
@command.json_option
def count(sample: float, as_json: bool, **values: Any) -> None:
    """Count the tokens of a corpus, without writing anything."""
    from .count import as_data, describe
    from .count import count as run

    if not 0 < sample <= 1:
        raise click.UsageError("--sample is a share: more than 0, at most 1")
    counts = run(options.build_config({**values, "out": "nowhere"}), sample)
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
@options.engine_options
@command.json_option
def verify(url: str, as_json: bool, **values: Any) -> None:
    """Check every byte and every count of a dataset."""
    from ..console.errors import IntegrityError
    from ..dataplane.datasets import manifest
    from .executors import EngineConfig
    from .verify import Damage, describe
    from .verify import verify as run

    config = options.checked(EngineConfig, options.engine_of(values))
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
            hint=("remove these files and run the build's command again: only their tasks are run"),
        )
    command.say(f"{url} is whole")


if __name__ == "__main__":
    main()
