"""`tokenize`: build token datasets from corpora."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..console import command, page
from ..console.progress import exact_count
from ..dataplane.shards import FORMATS, writable_formats
from . import options
from .builder.options import chat_options, fim_options, genome_options
from .neardup.commands import duplicates, neardup
from .views.commands import pack, pack_options, select, sort

if TYPE_CHECKING:
    from .views.pack import Long


@command.group("tokenize")
def main() -> None:
    """Build token datasets from corpora of text or sequences.

    \b
    Example:
      tokenize build corpus/*.jsonl --tokenizer byte --out data/web
      tokenize inspect data/web --document 0

    More: docs/tokenize.md
    """


@main.command("train")
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, help="File for the tokenizer's JSON.")
@click.option("--vocab-size", default=32768, show_default=True)
@options.special_option("")
@click.option("--sample", default="256Mi", show_default=True, help="Bytes of text to train on.")
@options.on_error_option
@options.source_options
@command.json_option
def train_command(as_json: bool, **values: Any) -> None:
    """Train a byte-level BPE tokenizer on a sample of a corpus.

    \b
    Example:
      tokenize train corpus/*.jsonl --out tokenizer.json --vocab-size 32768

    More: docs/tokenize.md
    """
    from .train import TrainConfig, train

    data = {
        "source": options.pop_source(values),
        "inputs": values["inputs"],
        "out": values["out"],
        "vocab_size": values["vocab_size"],
        "sample_bytes": options.parse_bytes(values["sample"], "--sample"),
        "on_error": values["on_error"],
    }
    if special := values["special"]:
        data["special_tokens"] = special
    config = options.build_checked(TrainConfig, data)
    tokenizer = train(config)
    if as_json:
        command.emit({"out": config.out, "vocab_size": tokenizer.get_vocab_size()})
        return
    command.say(f"{config.out}: {tokenizer.get_vocab_size()} tokens")


@main.command("build")
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, metavar="URL", help="Folder or URL of the dataset.")
@click.option("--format", type=click.Choice(writable_formats()), default="arrow", show_default=True)
@click.option(
    "--compression", metavar="zstd[:LEVEL]", help="For formats that can be compressed (mds)."
)
@click.option("--shard-size", default="64Mi", show_default=True, help="Bytes of tokens per shard.")
@click.option("--split", multiple=True, metavar="NAME=FRACTION", help="Hold documents out.")
@click.option("--shuffle", type=int, metavar="SEED", help="Shuffle documents across the build.")
@click.option(
    "--shuffle-memory",
    metavar="SIZE",
    help="--shuffle: pass through buckets; bytes of documents that a worker holds.",
)
@click.option(
    "--dedup", type=click.Choice(["exact"]), help="Keep only the first of byte-equal documents."
)
@click.option("--max-document-tokens", type=int, metavar="N", help="Split longer documents.")
@options.keep_option
@options.screen_options
@chat_options
@fim_options
@genome_options
@pack_options
@click.option(
    "--rehash",
    is_flag=True,
    help="Hash all inputs again, whatever their times say.",
)
@options.tokenizer_options
@options.source_options
@options.executor_options
@command.json_option
def build_command(as_json: bool, pack: int | None, pack_long: Long | None, **values: Any) -> None:
    """Build a dataset, or add files to it.

    A killed build resumes when the same command is run again.

    \b
    Example:
      tokenize build corpus/*.jsonl --tokenizer tokenizer.json --out data/web

    More: docs/tokenize.md
    """
    from ..dataplane.account.account import describe_counts, sum_counts
    from ..dataplane.datasets import packing
    from .builder.build import build
    from .views.build_packed import build_packed

    if pack_long is not None and pack is None:
        raise click.UsageError("--pack-long needs --pack")
    config = options.build_config(values)
    manifests = build(config) if pack is None else build_packed(config, pack, pack_long or "cut")
    if as_json:
        from .inspect import summary

        command.emit([summary(url) for url in manifests])
        return
    for url, manifest in manifests.items():
        if packing.bin_length(manifest) is None:
            command.say(
                f"{url}: {exact_count(manifest.documents, 'documents')}, "
                f"{exact_count(manifest.tokens, 'tokens')}"
            )
        else:
            command.say(f"{url}: {packing.describe(manifest)}")
    command.say(describe_counts(sum_counts(next(iter(manifests.values())))))


@main.command("index")
@click.argument("url")
@click.option("--format", type=click.Choice(["auto", *FORMATS]), default="auto")
@click.option("--column", help="Column of the ids, in formats with columns (tokens).")
@click.option("--dtype", help="Type of the ids, if the format does not record it.")
@click.option("--tokenizer", metavar="byte|FILE", help="Tokenizer that decodes the ids.")
@click.option("--end-of-document", metavar="TOKEN", help="FILE: token that ends every document.")
@click.option("--end-id", metavar="ID|none", help="Id that ends every document; none: no end id.")
@options.executor_options
@command.json_option
def index_command(as_json: bool, **values: Any) -> None:
    """Write a manifest for an external dataset, without copying it.

    \b
    Example:
      tokenize index data/megatron --tokenizer tokenizer.json --end-id 0

    More: docs/tokenize.md
    """
    from .index import IndexConfig, index

    if values["end_of_document"] and values["tokenizer"] in (None, "byte"):
        raise click.UsageError("--end-of-document is for a tokenizer.json only")
    if (end := values["end_id"]) not in (None, "none"):
        if not end.isdecimal():
            raise click.UsageError(f"--end-id {end}: it must be an id, or none")
        values["end_id"] = int(end)
    data = {"engine": options.pop_executor(values), **values}
    manifest = index(options.build_checked(IndexConfig, data))
    if as_json:
        from .inspect import summary

        command.emit(summary(values["url"]))
        return
    command.say(
        f"{values['url']}: {exact_count(manifest.documents, 'documents')}, "
        f"{exact_count(manifest.tokens, 'tokens')}"
    )


@main.command("count")
@click.argument("inputs", nargs=-1, required=True)
@click.option(
    "--sample",
    type=float,
    default=1.0,
    metavar="FRACTION",
    help="Tokenize only this fraction of the text, and estimate the count.",
)
@chat_options
@options.tokenizer_options
@options.source_options
@options.executor_options
@command.json_option
def count_command(sample: float, as_json: bool, **values: Any) -> None:
    """Count the tokens of a corpus without writing anything.

    \b
    Example:
      tokenize count corpus/*.jsonl --tokenizer tokenizer.json --sample 0.01

    More: docs/tokenize.md
    """
    from .count import count, describe, make_json_data

    if not 0 < sample <= 1:
        raise click.UsageError("--sample is a fraction: more than 0, at most 1")
    counts = count(options.build_config({**values, "out": "nowhere"}), sample)
    if as_json:
        command.emit(make_json_data(counts))
    else:
        click.echo(describe(counts))


@main.command("inspect")
@click.argument("url")
@click.option("--document", "number", type=int, metavar="N", help="Show document N as text.")
@click.option(
    "--documents",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Show the first N documents.",
)
@command.json_option
def inspect_command(url: str, number: int | None, documents: int, as_json: bool) -> None:
    """Show the size, settings and origin of a dataset, and its documents as text.

    A folder with the splits of a build shows each of them.

    \b
    Example:
      tokenize inspect data/web --document 0

    More: docs/tokenize.md
    """
    from ..console.errors import MisuseError
    from ..dataplane.datasets.manifest import list_splits
    from .inspect import describe, describe_document, make_json_data

    urls = list(list_splits(url).values())
    if number is not None and len(urls) > 1:
        raise MisuseError(
            f"{url} holds splits, and --document counts the documents of one of them",
            hint=f"name one: {', '.join(urls)}",
        )
    numbers = range(documents) if number is None else [number]
    if as_json:
        data = [make_json_data(split, numbers) for split in urls]
        command.emit(data if len(urls) > 1 else data[0])
        return
    for split in urls:
        if number is None:
            click.echo(describe(split))
        for k in numbers:
            click.echo(f"\n{describe_document(split, k)}")


@main.command("contamination")
@click.argument("dataset", metavar="URL")
@click.argument("evaluations", nargs=-1, required=True, metavar="EVALS…")
@click.option("--out", metavar="FILE.parquet", help="Write a row for each place.")
@options.evaluation_options
@options.executor_options
@command.json_option
def contamination_command(
    dataset: str, evaluations: tuple[str, ...], out: str | None, as_json: bool, **values: Any
) -> None:
    """Find n-grams of evaluations in the documents of a dataset.

    \b
    Example:
      tokenize contamination data/web 'evals/**/*.jsonl' --out found.parquet

    More: docs/tokenize.md, section Decontamination
    """
    from ..dataplane.storage import storage
    from .contamination import (
        ContaminationConfig,
        describe,
        find_contamination,
        make_json_data,
        write_parquet,
    )

    data = {
        "dataset": dataset,
        "engine": options.pop_executor(values),
        "evaluations": options.pop_evaluations(values, evaluations),
    }
    if out is not None:
        storage.check_writable(out, file=True)
    report = find_contamination(options.build_checked(ContaminationConfig, data))
    if out is not None:
        write_parquet(report, out)
    if as_json:
        command.emit(make_json_data(report))
    else:
        click.echo(describe(report))


@main.command("card")
@click.argument("url")
@click.option("--license", "licenses", multiple=True, metavar="NAME", help="May be repeated.")
@click.option("--source", "sources", multiple=True, metavar="TEXT", help="May be repeated.")
@page.out_option
def card_command(
    url: str, licenses: tuple[str, ...], sources: tuple[str, ...], out: str | None
) -> None:
    """Write a page about a dataset: size, origin, lengths, counts of the build, kept fields.

    A folder with the splits of a build gives one page with all of them.

    Licences and sources that are given are kept in about.json beside the manifest; the cards of
    mixtures show them too.

    \b
    Example:
      tokenize card data/web --license CC-BY-4.0 --source "Common Crawl 2026-10" --out NAME.md

    More: docs/tokenize.md
    """
    from ..dataplane.datasets.manifest import list_splits
    from ..dataplane.storage import storage
    from .card import card

    urls = list_splits(url).values()
    text = "\n".join(card(split, licenses=licenses, sources=sources) for split in urls)
    if out is None:
        click.echo(text, nl=False)
        return
    storage.write(out, page.render_file(text, out))
    command.say(f"wrote {out}")


@main.command("verify")
@click.argument("url")
@click.option("--deep", is_flag=True, help="Of a view: check its whole dataset too.")
@options.executor_options
@command.json_option
def verify_command(url: str, deep: bool, as_json: bool, **values: Any) -> None:
    """Check every byte and every count of a dataset.

    \b
    Example:
      tokenize verify data/web

    More: docs/tokenize.md
    """
    from ..console.errors import IntegrityError
    from ..dataplane.datasets import manifest
    from .executors import ExecutorConfig
    from .verify import Damage, describe, verify

    config = options.build_checked(ExecutorConfig, options.pop_executor(values))
    try:
        damage = verify(url, config, deep=deep)
    except IntegrityError as error:  # the manifest is damaged
        if as_json:
            command.emit([vars(Damage(manifest.NAME, error.message))])
        raise
    if as_json:
        command.emit([vars(item) for item in damage])
    if damage:
        raise IntegrityError(
            describe(url, damage),
            hint="; ".join(dict.fromkeys(item.hint for item in damage)),
        )
    command.say(f"{url}: no damage found")


main.add_command(neardup)
main.add_command(duplicates)
main.add_command(select)
main.add_command(pack)
main.add_command(sort)

if __name__ == "__main__":
    main()
