"""The command `trainer`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console import command
from ..console.commands import TRAINER, lazy, write_report
from ..console.errors import SeveralErrors, UserError
from ..console.progress import format_bytes, format_count
from .cluster.commands import RankCommand, RankCommandGroup
from .inference.commands import embed, variants
from .inference.sample import sample
from .launch.options import StartOptions, add_start_options, command_words
from .scores.commands import eval_command, recall
from .weights.commands import export

if TYPE_CHECKING:
    from .cluster.end import PlainEnd
    from .cluster.ranks import StopRequest
    from .launch.template import Template
    from .run.job import Job


@command.group("trainer", cls=RankCommandGroup)
def main() -> None:
    """Train a model on a mixture, resume runs, and report on them.

    \b
    Examples:
      trainer run --mixture anneal.yaml --out runs/anneal
      trainer resume runs/anneal

    More: docs/trainer.md
    """


def add_run_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command with the options that `run` and `resume` share."""
    options = (
        click.option("--processes", type=click.IntRange(1), help="Ranks on this machine."),
        add_start_options,
        click.option(
            "--slurm", is_flag=True, help="Submit a batch job that requeues itself until the end."
        ),
        click.option(
            "--dry-run", is_flag=True, help="Resolve, check and print everything; start nothing."
        ),
        command.json_option,
    )
    for option in reversed(options):
        function = option(function)
    return function


def run_keys() -> Iterator[str]:
    """Yield the paths to a run's keys."""
    from ..console.config import key_paths
    from .run.config import RunConfig

    return key_paths(RunConfig)


def keys() -> Iterator[str]:
    """Yield the paths to the keys of run, mixture and model."""
    from ..console.config import key_paths
    from ..mixtures.mixture_file.mixture import Mixture
    from ..models.config.config import ModelConfig

    yield from run_keys()
    yield from (f"mixture.{key}" for key in key_paths(Mixture))
    yield from (f"model.{key}" for key in key_paths(ModelConfig))


@main.command(cls=RankCommand, keys=keys)
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [PATH.TO.KEY=VALUE]...")
@click.option("--mixture", metavar="FILE", help="The mixture's YAML.")
@click.option("--model", metavar="NAME|FILE", help="A shipped model or a YAML [tiny-hybrid].")
@click.option(
    "--out",
    metavar="FOLDER",
    callback=command.local_path,
    help="The run's folder [runs/NAME].",
)
@click.option(
    "--layout",
    metavar="FILE",
    help="A plan of `trainer plan`: layout, engine, micro-batches and recompute of each layer.",
)
@click.option(
    "--init-from",
    metavar="PATH",
    help="Initial weights: a run, a checkpoint, or a folder of transformers or Vortex.",
)
@add_run_options
def run(
    arguments: tuple[str, ...],
    mixture: str | None,
    model: str | None,
    out: str | None,
    layout: str | None,
    init_from: str | None,
    processes: int | None,
    slurm: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Start a run; the same command restarts and resumes it.

    Overrides set keys of the run; overrides that begin with `mixture.` or `model.` set keys of
    those files. `--dry-run` prints every key with its value.

    Exit codes: 0 finished, 85 saved and stopped early (start it again), 1 failed, 2 misuse.

    \b
    Example:
      trainer run --mixture anneal.yaml --out runs/anneal optimizer.lr=1e-3

    More: docs/trainer.md
    """
    from .cluster import ranks
    from .cluster.end import PlainEnd

    # Before torch is imported, which takes seconds.
    stop_request = click.get_current_context().with_resource(ranks.handle_stop_signals())
    end = PlainEnd()
    from .launch import template
    from .run.request import RunRequest
    from .run.resolve import is_readable, resolve

    files = [word for word in arguments if _is_file(word)]
    if len(files) > 1:
        raise click.UsageError(f"one RUN.yaml at most, not {', '.join(files)}")
    overrides = [word for word in arguments if word not in files]
    command.check_overrides(overrides)
    overrides += _processes_override(processes)
    if init_from is not None:
        overrides.append(f"init_from.path={init_from}")
    request = RunRequest(
        run=files[0] if files else None,
        mixture=mixture,
        model=model,
        out=out,
        layout=layout,
        overrides=overrides,
        slurm=slurm,
        dry_run=dry_run,
    )
    starts = not (slurm or dry_run) and is_readable(request)
    with template.rank_template(end, needed=starts) as forks:
        job = resolve(request)
        _start_or_submit(job, stop_request, end, forks, slurm=slurm, dry_run=dry_run, **options)


@main.command(cls=RankCommand, keys=run_keys)
@click.argument("folder", metavar="RUN")
@command.overrides_argument
@add_run_options
def resume(
    folder: str,
    overrides: tuple[str, ...],
    processes: int | None,
    slurm: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Resume the run in the folder RUN; nothing else is needed.

    \b
    Example:
      trainer resume runs/anneal --stop-after 1000

    More: docs/trainer.md
    """
    from .cluster import ranks
    from .cluster.end import PlainEnd

    stop_request = click.get_current_context().with_resource(ranks.handle_stop_signals())
    end = PlainEnd()
    from .folders.folder import RunFolder
    from .launch import template
    from .run.resolve import load

    run_folder = RunFolder(folder)
    starts = not (slurm or dry_run) and run_folder.begun
    with template.rank_template(end, needed=starts) as forks:
        words = [*overrides, *_processes_override(processes)]
        job = load(run_folder, words, slurm=slurm, dry_run=dry_run)
        _start_or_submit(job, stop_request, end, forks, slurm=slurm, dry_run=dry_run, **options)


main.add_lazy(*lazy(TRAINER, "report", "documents", "board", "list"))


@main.command()
@click.argument("folders", nargs=-1, required=True, metavar="RUN...")
@click.option("--keep-last", type=click.IntRange(1), help="Newest checkpoints to keep.")
@click.option("--keep-every", type=click.IntRange(1), help="Keep steps that this divides.")
@click.option("--keep-abandoned", type=click.IntRange(0), help="Latest abandoned ones to keep.")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
@command.json_option
def clean(folders: tuple[str, ...], dry_run: bool, as_json: bool, **policy: Any) -> None:
    """Delete old checkpoints, and the tails of records, of runs that are not going.

    Which checkpoints are kept: the run's own policy (`checkpoints:` of its run.yaml) with these
    options in place of its values, and those at the ends of phases. A tail holds the lines that a
    start after a kill has cut from a record (`ledger.after-500.jsonl`).

    \b
    Example:
      trainer clean runs/anneal --keep-last 1 --dry-run

    More: docs/checkpoints.md
    """
    from .checkpoints import housekeeping
    from .folders.folder import RunFolder
    from .run.stored import read_run

    changes = {key: value for key, value in policy.items() if value is not None}
    deleted = []
    for job in [read_run(RunFolder(folder)) for folder in folders]:
        config = replace(job.run.checkpoints, **changes)
        deleted += housekeeping.clean(job.folder, config, job.ends, dry_run=dry_run)
    if as_json:
        command.emit([asdict(item) for item in deleted])
    for item in deleted:
        size = "of unknown size" if item.size is None else format_bytes(item.size)
        command.say(f"{'would delete' if dry_run else 'deleted'} {item.path} ({size})")
    total = format_bytes(sum(item.size or 0 for item in deleted))
    tails = sum(item.kind == "tail" for item in deleted)
    counts = format_count(len(deleted) - tails, "checkpoints")
    counts += f", {format_count(tails, 'record tails')}" if tails else ""
    command.say(f"{counts}, {total}{', nothing deleted' if dry_run else ''}")


main.add_lazy(*lazy(TRAINER, "plan", "profile"))
for subcommand in (export, sample, eval_command, recall, variants, embed):
    main.add_command(subcommand)
main.add_lazy(*lazy(TRAINER, "tune", "anneal"))


def _is_file(word: str) -> bool:
    """True for a RUN.yaml among the arguments."""
    return "=" not in word and (word.endswith((".yaml", ".yml")) or Path(word).exists())


def _processes_override(processes: int | None) -> list[str]:
    return [] if processes is None else [f"processes={processes}"]


def _start_or_submit(
    job: Job,
    stop_request: StopRequest,
    end: PlainEnd,
    forks: Template | None,
    *,
    slurm: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Start the job here, or submit a batch job that repeats this command."""
    from .cluster import ranks
    from .launch import preflight

    context = click.get_current_context()
    debug = bool(context.find_root().meta.get(command.DEBUG))
    start_options = StartOptions(debug=debug, **options)
    preflight.check_profile(job, start_options)
    preflight.check(job)
    words = None
    if slurm:
        words = command_words(context, without=frozenset({"slurm", "dry_run", "as_json"}))
    if dry_run:
        preflight.check_folder(job)
        _describe(job, words, as_json)
        return
    from .launch import start

    if words is not None:
        number = start.submit(job, words)
        if as_json:
            command.emit({"job": number, "script": str(job.folder.slurm)})
        command.say(f"submitted as job {number}: {job.folder.slurm}")
        return
    code = start.start(job, start_options, stop_request, forks, write_report)
    if as_json and ranks.is_first():
        command.emit(start.describe_outcome(job, code))
    if ranks.is_rank():
        end.code = code
    sys.exit(code)


def _describe(job: Job, words: list[str] | None, as_json: bool) -> None:
    from .accounting.describe import configuration, describe, lines
    from .launch import preflight

    description, script = describe(job, activations=True), {}
    if words is not None:
        from .launch import start

        script = {"slurm": start.batch_script(job, words)}
    warnings = []
    if words is None:  # the run may be meant for another machine
        try:
            preflight.check_machine(job)
        except UserError as error:
            errors = error.errors if isinstance(error, SeveralErrors) else (error,)
            warnings = [f"a start on this machine would fail: {error}" for error in errors]
    if as_json:
        command.emit(description | script | {"warnings": [*description["warnings"], *warnings]})
        return
    sections = [*lines(description), configuration(description), *script.values()]
    sections += [f"warning: {warning}" for warning in warnings]
    command.say("\n".join(sections))


if __name__ == "__main__":
    main()
