"""The command `headrace compare-hybrids`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ...console import command

if TYPE_CHECKING:
    from .folder import ComparedRun
    from .prepare import PreparedComparison
    from .results import Comparison


def _lengths(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    from ...trainer.scores.commands import parse_lengths

    return parse_lengths(context, parameter, value)


@click.command(cls=command.Command)
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [PATH.TO.KEY=VALUE]...")
@click.option("--mixture", required=True, metavar="FILE", help="The rows of all runs.")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME|FILE",
    help="A shipped model or a YAML; repeatable [five shipped models of 1M parameters].",
)
@click.option(
    "--tokens",
    callback=command.token_count,
    metavar="N",
    help="Train each run until this token, such as 2M.",
)
@click.option(
    "--slice",
    "slice_tokens",
    callback=command.token_count,
    default="250K",
    show_default=True,
    metavar="N",
    help="Tokens of a round: all runs reach its end before one goes on.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Runs of the first model, with other initial weights: the noise.",
)
@click.option(
    "--lengths",
    callback=_lengths,
    default="64,128,256,512",
    show_default=True,
    metavar="TOKENS,...",
    help="Contexts in which recall is measured.",
)
@click.option(
    "--examples",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Recall: examples of each task and length.",
)
@click.option(
    "--out",
    default="runs/hybrids",
    show_default=True,
    metavar="FOLDER",
    callback=command.local_path,
    help="Folder of the runs.",
)
@command.json_option
def compare_hybrids(
    arguments: tuple[str, ...],
    mixture: str,
    models: tuple[str, ...],
    tokens: int | None,
    slice_tokens: int,
    seeds: int,
    lengths: list[int],
    examples: int,
    out: str,
    as_json: bool,
) -> None:
    """Train models of equal size on the same rows, and compare them on one page.

    The runs are trained in rounds, so that all stand at equal tokens whenever the time ends. The
    same command continues after a kill, or with more --tokens. Their ledgers must prove that the
    rows are equal. Without --tokens, nothing is trained: the page shows the runs as they stand.
    Overrides set keys of the runs; those that begin with `mixture.` set keys of the mixture.

    \b
    Example:
      headrace compare-hybrids --mixture mixture.yaml --tokens 2M --seeds 3

    More: docs/tutorials/hybrids.md
    """
    from ..anneal.train import Interrupted
    from .folder import ComparisonFolder, write_results
    from .page import comparison_page
    from .prepare import SHIPPED, prepare
    from .results import read_comparison, results_json
    from .train import measure_recall, train

    files = [word for word in arguments if word.endswith((".yaml", ".yml")) and "=" not in word]
    if len(files) > 1:
        raise click.UsageError(f"one RUN.yaml at most, not {', '.join(files)}")
    overrides = [word for word in arguments if word not in files]
    command.check_overrides(overrides)
    prepared = prepare(files[0] if files else None, mixture, models or SHIPPED, overrides)
    folder = ComparisonFolder(out)
    with folder.locked():
        folder.begin(prepared)
        entries = _entries(prepared, seeds)
        if tokens is not None:
            try:
                train(folder, entries, _round_ends(prepared, tokens, slice_tokens))
            except Interrupted:
                from ...trainer.cluster.ranks import INTERRUPTED

                command.say("a run saved and stopped; the same command goes on")
                sys.exit(INTERRUPTED)
        comparison = read_comparison(folder, prepared, entries)
        if tokens is not None:
            data = prepared.held_out.sources[0].url
            for entry in entries:
                measure_recall(
                    folder, entry, comparison.step, data=data, lengths=lengths, examples=examples
                )
            comparison = read_comparison(folder, prepared, entries)
        results = results_json(comparison, folder)
        write_results(folder, results, comparison_page(comparison))
    if as_json:
        command.emit(results)
    command.say("\n".join(_lines(comparison)))
    command.say(f"page: {folder.page}\nresults: {folder.results}")


def _entries(prepared: PreparedComparison, num_seeds: int) -> list[ComparedRun]:
    """Return all models with the first seed, then the first model with further seeds."""
    from .folder import ComparedRun

    first, *_ = prepared.models
    seed = prepared.run.seed
    return [
        *(ComparedRun(name, seed) for name in prepared.models),
        *(ComparedRun(first, seed + number) for number in range(1, num_seeds)),
    ]


def _round_ends(prepared: PreparedComparison, tokens: int, slice_tokens: int) -> Iterator[int]:
    """Yield the step at the end of each round."""
    from ...console.errors import PlanError

    plan = prepared.plan
    if tokens > plan.end_token - plan.first_token:
        raise PlanError(
            f"the mixture has {plan.end_token - plan.first_token:,} tokens, fewer than {tokens:,}",
            hint="plan more in the first phase, or ask for fewer --tokens",
        )
    for end in range(slice_tokens, tokens, slice_tokens):
        yield prepared.step_at(end)
    yield prepared.step_at(tokens)


def _lines(comparison: Comparison) -> Iterator[str]:
    from ...console.progress import format_number
    from .page import noise_sentence, rows_sentence

    width = max(len(result.name) for result in comparison.results)
    sources = list(comparison.results[0].by_source)
    tasks = list(dict.fromkeys(task for r in comparison.results for task in r.recall))
    heads = ["bits/byte", *sources, *tasks, "tokens/s"]
    yield f"{'':<{width}}  params  {'  '.join(f'{head:>9}' for head in heads)}"
    for result in comparison.results:
        count = comparison.parameters.get(result.model) if result.seed is not None else None
        cells = [
            f"{result.bits[-1]:.4f}" if result.bits else "–",
            *(f"{result.by_source.get(source, float('nan')):.4f}" for source in sources),
            *(_mean_accuracy(result.recall.get(task, ())) for task in tasks),
            f"{result.tokens_per_second:,.0f}",
        ]
        params = "" if count is None else format_number(count)
        yield f"{result.name:<{width}}  {params:>6}  {'  '.join(f'{c:>9}' for c in cells)}"
    yield rows_sentence(comparison)
    yield noise_sentence(comparison)


def _mean_accuracy(scores: Any) -> str:
    """Format the share of right answers over all lengths."""
    return f"{sum(s['accuracy'] for s in scores) / len(scores):.1%}" if scores else "–"
