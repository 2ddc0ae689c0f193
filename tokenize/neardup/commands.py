"""Commands: `tokenize neardup` and `tokenize duplicates`."""

from __future__ import annotations

from typing import Any

import click

from ...console import command
from .. import options
from ..builder.options import conversation_options, pop_conversation_fields


@click.command("neardup")
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, metavar="FILE.parquet", help="Drop list for `build --drop`.")
@click.option("--ngram", type=int, metavar="N", help="Words of a run that documents share (5).")
@click.option("--bands", type=int, metavar="N", help="Bands of a signature (14).")
@click.option("--rows", type=int, metavar="N", help="Numbers of a band (8).")
@click.option("--threshold", type=float, metavar="S", help="Choose bands and rows for it.")
@click.option("--permutations", type=int, metavar="N", help="--threshold: most numbers (112).")
@click.option("--seed", type=int, metavar="SEED", help="Seed of the permutations (1).")
@options.on_error_option
@options.source_options
@conversation_options
@options.executor_options
@command.json_option
def neardup(as_json: bool, **values: Any) -> None:
    """Find near-duplicates of a corpus by MinHash, and write a list for `build --drop`.

    The first document of each cluster stays. A killed search resumes when the same command is run
    again.

    \b
    Example:
      tokenize neardup corpus/*.jsonl --out drop.parquet
      tokenize build corpus/*.jsonl --drop drop.parquet --tokenizer byte --out data/web

    More: docs/tokenize.md, section Near-duplicates
    """
    from .find import NeardupConfig, describe, find_neardups

    data = {
        "inputs": values["inputs"],
        "out": values["out"],
        "lsh": _lsh_settings(values),
        "on_error": values["on_error"],
        "engine": options.pop_executor(values),
        "source": options.pop_source(values),
        "conversations": pop_conversation_fields(values),
    }
    results = find_neardups(options.build_checked(NeardupConfig, data))
    if as_json:
        command.emit(vars(results))
    else:
        click.echo(describe(results, values["out"]))


def _lsh_settings(values: dict[str, Any]) -> dict[str, int]:
    from .lsh import MAX_PERMUTATIONS, choose_bands

    names = ("ngram", "bands", "rows", "seed")
    settings = {name: values.pop(name) for name in names}
    threshold, permutations = values.pop("threshold"), values.pop("permutations")
    if threshold is None:
        if permutations is not None:
            raise click.UsageError("--permutations needs --threshold; or give --bands and --rows")
    else:
        if settings["bands"] is not None or settings["rows"] is not None:
            raise click.UsageError("--threshold chooses bands and rows: leave --bands, --rows out")
        if not 0 < threshold < 1:
            raise click.UsageError(f"--threshold {threshold}: it must be between 0 and 1")
        permutations = 112 if permutations is None else permutations
        if not 1 <= permutations <= MAX_PERMUTATIONS:
            raise click.UsageError(
                f"--permutations {permutations}: it must be from 1 to {MAX_PERMUTATIONS}"
            )
        settings["bands"], settings["rows"] = choose_bands(threshold, permutations)
    return {name: value for name, value in settings.items() if value is not None}


@click.command("duplicates")
@click.argument("drop_list", metavar="FILE.parquet")
@click.option("--cluster", type=int, metavar="N", help="Show this cluster, by its number.")
@click.option("--first", type=click.IntRange(0), default=0, help="Leave out the largest clusters.")
@click.option("--count", type=click.IntRange(1), default=5, show_default=True, help="Clusters.")
@click.option(
    "--most",
    "max_duplicates",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Duplicates of a cluster.",
)
@command.json_option
def duplicates(
    drop_list: str, cluster: int | None, first: int, count: int, max_duplicates: int, as_json: bool
) -> None:
    """Show the largest clusters that `tokenize neardup` found, their texts side by side.

    \b
    Example:
      tokenize duplicates drop.parquet --count 10

    More: docs/tokenize.md, section Near-duplicates
    """
    from dataclasses import asdict

    from .show import describe, show_clusters

    shown = show_clusters(
        drop_list, first=first, count=count, max_duplicates=max_duplicates, number=cluster
    )
    if as_json:
        command.emit([asdict(shown_cluster) for shown_cluster in shown])
        return
    for shown_cluster in shown:
        click.echo(describe(shown_cluster))
