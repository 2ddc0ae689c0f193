"""`trainer eval` and `trainer recall`: scores of weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ...console import command
from ...console.errors import SeveralErrors, StorageError, UserError
from ..cluster.commands import RankCommand
from ..folders.folder import RECALL, SCORES
from ..placement.options import PlacementOptions, placement_options
from ..weights.commands import SOURCE, data_option, ema_option, step_option

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from ..weights.source import WeightSource
    from .config import ScoresConfig

batch_option = click.option(
    "--batch-tokens",
    type=click.IntRange(1),
    default=16384,
    show_default=True,
    help="Most tokens of a batch, with its padding.",
)


def _parse_tasks(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    if value is None:
        return None
    tasks = tuple(dict.fromkeys(task for task in value.split(",") if task))
    if not tasks:
        raise click.UsageError("--tasks names no task")
    return tasks


@click.command("eval", cls=RankCommand)
@click.argument("source", metavar=SOURCE)
@click.option(
    "--tasks",
    metavar="NAME,...",
    callback=_parse_tasks,
    help="Tasks or groups of the harness [those of the run's key scores, with its settings].",
)
@click.option(
    "--include-path",
    type=click.Path(exists=True, file_okay=False),
    metavar="FOLDER",
    help="Folder with YAML files of more tasks.",
)
@click.option("--limit", type=click.IntRange(1), help="Most documents of each task [all].")
@click.option("--num-fewshot", type=click.IntRange(0), help="Examples before a question [task's].")
@click.option(
    "--max-length",
    type=click.IntRange(2),
    metavar="TOKENS",
    help="Longest context [the run's longest row; 2,048 for weights without a run].",
)
@batch_option
@step_option
@ema_option
@data_option
@placement_options(shares_rows=True)
@command.json_option
@click.pass_context
def eval_command(
    context: click.Context,
    source: str,
    tasks: tuple[str, ...] | None,
    include_path: str | None,
    limit: int | None,
    num_fewshot: int | None,
    max_length: int | None,
    batch_tokens: int,
    step: int | None,
    ema: bool,
    data: str | None,
    placement: PlacementOptions,
    as_json: bool,
) -> None:
    """Score a checkpoint on tasks of lm-evaluation-harness.

    RUN is a run's folder; CHECKPOINT is the folder of one checkpoint, its s3:// URL, or a folder of
    transformers or of Vortex. The scores of a run are added to its scores.jsonl and its report.

    \b
    Example:
      trainer eval runs/anneal --tasks hellaswag,arc_easy

    More: docs/eval.md
    """
    from .config import check_installed

    check_installed("trainer eval")
    from ..placement.ranks import joined_row_ranks
    from ..weights import sample as samples
    from ..weights import source as sources
    from ..weights.tokenizer import find_tokenizer
    from . import records
    from .answers import rank_team

    config = _resolve_config(
        context,
        sources.find(source, step),
        tasks=tasks,
        include_path=include_path,
        limit=limit,
        num_fewshot=num_fewshot,
        max_length=max_length,
        batch_tokens=batch_tokens,
        ema=ema,
    )
    weights = sources.find(source, step, average=config.ema)
    tokenizer = find_tokenizer(weights, data)
    samples.check_vocabulary(tokenizer, weights.model)
    records.context_length(weights, config.max_length)  # raises if it is too long

    def load_tasks() -> TaskManager:
        from . import harness  # imports `datasets` and more: slow, so after the checks above

        return harness.load_tasks(config.tasks, config.include_path)

    with joined_row_ranks(placement.place(weights, as_trained=False)) as ranks:
        manager = ranks.run_on_first(load_tasks)
        team = rank_team(ranks, weights, tokenizer)

        def evaluate() -> tuple[dict[str, Any], list[UserError]]:
            from . import harness

            return harness.evaluate(team, weights, tokenizer, config, manager)

        evaluation = team.lead(evaluate)
    if evaluation is None:  # rank 0 writes
        return
    entry, errors = evaluation
    if entry["tasks"]:
        path = _store(weights, SCORES, entry, errors)
        if as_json:
            command.emit(entry | {"stored": path})
        else:
            for (task, metric), score in records.format_scores(entry).items():
                click.echo(f"{task:<24} {metric:<24} {score}")
            _say_stored(weights, path)
    if errors:
        raise errors[0] if len(errors) == 1 else SeveralErrors(errors)


def _resolve_config(context: click.Context, source: WeightSource, **options: Any) -> ScoresConfig:
    """Return the settings for an evaluation: the options; without --tasks, the run's settings,
    changed by options on the command line."""
    from ..weights.source import Checkpoint
    from .config import ScoresConfig, read_run_config

    if options["tasks"] is not None:
        return ScoresConfig(**options)
    run = source.run if isinstance(source, Checkpoint) else None
    run_config = None if run is None else read_run_config(run)
    if run_config is None:
        raise click.UsageError(
            "name tasks with --tasks: "
            + ("the key scores of the run is not set" if run else "these are weights without a run")
        )
    changes = {
        option: value
        for option, value in options.items()
        if context.get_parameter_source(option) is ParameterSource.COMMANDLINE
    }
    return replace(run_config, **changes)


def _store(
    weights: WeightSource, file_name: str, entry: dict[str, Any], errors: list[UserError]
) -> str | None:
    """Append results to a file in the run's folder and return its path. A failure is added to
    `errors` instead of raised: results that took long are printed first."""
    from . import records

    try:
        return records.store(weights, file_name, entry)
    except StorageError as error:
        errors.append(error)
        return None


def _say_stored(weights: WeightSource, path: str | None) -> None:
    if path is not None:
        command.say(f"stored in {path}")
    elif getattr(weights, "run", None) is None:
        command.say("not stored: these are weights without a run")


def parse_lengths(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    from .recall import SHORTEST

    words = [word for word in value.split(",") if word]
    wrong = next((word for word in words if not word.isdecimal() or int(word) < SHORTEST), None)
    if wrong is not None or not words:
        raise click.BadParameter(f"{wrong or value!r} is not a number of at least {SHORTEST}.")
    return sorted({int(word) for word in words})


def _parse_recall_tasks(
    context: click.Context, parameter: click.Parameter, value: str
) -> list[str]:
    from .recall import TASKS

    tasks = list(dict.fromkeys(value.split(",")))
    unknown = [task for task in tasks if task not in TASKS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(TASKS)}.")
    return tasks


@click.command(cls=RankCommand)
@click.argument("source", metavar=SOURCE)
@click.option(
    "--tasks",
    metavar="NAME,...",
    callback=_parse_recall_tasks,
    default="needle,copy,mqar",
    show_default=True,
)
@click.option(
    "--lengths",
    metavar="TOKENS,...",
    callback=parse_lengths,
    default="256,512,1024,2048,4096",
    show_default=True,
    help="Lengths of the contexts.",
)
@click.option(
    "--examples",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Examples of each task and length.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The same seed gives the same examples."
)
@batch_option
@step_option
@ema_option
@data_option
@placement_options(shares_rows=True)
@command.json_option
def recall(
    source: str,
    tasks: list[str],
    lengths: list[int],
    examples: int,
    seed: int,
    batch_tokens: int,
    step: int | None,
    ema: bool,
    data: str | None,
    placement: PlacementOptions,
    as_json: bool,
) -> None:
    """Measure what a checkpoint recalls of its context, by length.

    needle: a random string in text of a dataset; copy: a random sequence, twice; mqar: associative
    recall of many pairs. Nothing is downloaded. The results of a run are added to its recall.jsonl
    and its report.

    \b
    Example:
      trainer recall runs/anneal --lengths 1024,4096,16384

    More: docs/eval.md
    """
    from ...dataplane.datasets.dataset import Dataset
    from ..placement.ranks import joined_row_ranks
    from ..weights import sample as samples
    from ..weights import source as sources
    from ..weights.tokenizer import find_dataset
    from . import records
    from .answers import rank_team
    from .recall import Material, measure_recall

    weights = sources.find(source, step, average=ema)
    url, tokenizer = find_dataset(weights, data)
    samples.check_vocabulary(tokenizer, weights.model)
    records.check_length(weights, lengths[-1], "--lengths")
    material = Material.read(Dataset(url), lengths[-1])
    with joined_row_ranks(placement.place(weights, as_trained=False)) as ranks:
        team = rank_team(ranks, weights, tokenizer)
        options = {"count": examples, "seed": seed, "batch_tokens": batch_tokens}
        results_by_task = team.lead(
            lambda: measure_recall(team, material, tasks, lengths, **options)
        )
    if results_by_task is None:  # rank 0 writes
        return
    settings = {"data": url, "examples": examples, "seed": seed, "ema": ema}
    entry = {"from": weights.where, **settings, "tasks": results_by_task}
    errors: list[UserError] = []
    path = _store(weights, RECALL, entry, errors)
    if as_json:
        command.emit(entry | {"stored": path})
    else:
        for task, results in results_by_task.items():
            for result in results:
                click.echo(
                    f"{task:<8} {result['length']:>9,} tokens   {result['accuracy']:7.2%} right"
                    f"   loss {result['loss']:.4f}"
                )
        _say_stored(weights, path)
    if errors:
        raise errors[0]
