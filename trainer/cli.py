"""The command `trainer`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..console import command
from .weights.commands import export, sample

if TYPE_CHECKING:
    from .run.request import Start
    from .run.run import Job


@command.group("trainer")
def main() -> None:
    """Train a model on a mixture; go on where it stopped; report what it did."""


def start_options(function: Callable[..., None]) -> Callable[..., None]:
    """What is asked of one start, and is no part of the run."""
    options = (
        click.option("--processes", type=click.IntRange(1), help="Processes on this machine."),
        click.option(
            "--stop-after",
            type=click.IntRange(1),
            metavar="STEP",
            help="Interrupt the run after so many steps of the plan, as a scheduler would.",
        ),
        click.option(
            "--fallback",
            is_flag=True,
            help="Go on from the checkpoint before, if the newest is damaged.",
        ),
        click.option(
            "--profile",
            metavar="FIRST:LAST",
            help="Trace these steps with torch's profiler, as in 10:15.",
        ),
        click.option(
            "--slurm", is_flag=True, help="Submit a batch job that goes on until it is finished."
        ),
        click.option(
            "--dry-run", is_flag=True, help="Resolve, check and print everything; start nothing."
        ),
        command.json_option,
    )
    for option in reversed(options):
        function = option(function)
    return function


@main.command()
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [PATH.TO.KEY=VALUE]...")
@click.option("--mixture", metavar="FILE", help="The mixture's YAML.")
@click.option("--model", metavar="NAME|FILE", help="A shipped model or a YAML [tiny-hybrid].")
@click.option("--out", metavar="FOLDER", help="The run's folder [runs/NAME].")
@click.option(
    "--init-from",
    metavar="PATH",
    help="Begin with the weights of a run, a checkpoint, or a folder of transformers or Vortex.",
)
@start_options
def run(
    arguments: tuple[str, ...],
    mixture: str | None,
    model: str | None,
    out: str | None,
    init_from: str | None,
    processes: int | None,
    slurm: bool,
    **asked: Any,
) -> None:
    """Start a run; the same command restarts and resumes it.

    Overrides go to the run's own keys; those that begin with `mixture.` or `model.` go into these
    files. `--dry-run` shows every key with its value.

    Exit codes: 0 finished, 85 saved and stopped early (start it again), 1 failed, 2 misuse.
    """
    from .run.request import Request
    from .run.resolve import resolve

    overrides = [word for word in arguments if "=" in word]
    overrides += _as_override(processes)
    files = [word for word in arguments if "=" not in word]
    if len(files) > 1:
        raise click.UsageError(f"one RUN.yaml at most, not {', '.join(files)}")
    if init_from is not None:
        overrides.append(f"init_from.path={init_from}")
    request = Request(
        run=files[0] if files else None,
        mixture=mixture,
        model=model,
        out=out,
        overrides=overrides,
        slurm=slurm,
    )
    _go(resolve(request), slurm=slurm, **asked)


@main.command()
@click.argument("folder", metavar="RUN")
@command.overrides_argument
@start_options
def resume(
    folder: str,
    overrides: tuple[str, ...],
    processes: int | None,
    slurm: bool,
    **asked: Any,
) -> None:
    """Go on with the run in the folder RUN; nothing else is needed."""
    from .folder import RunFolder
    from .run.resolve import load

    words = [*overrides, *_as_override(processes)]
    _go(load(RunFolder(folder), words, slurm=slurm), slurm=slurm, **asked)


@main.command()
@click.argument("folders", nargs=-1, required=True, metavar="RUN...")
@click.option("--compare", is_flag=True, help="One page that shows the runs side by side.")
@click.option("--out", metavar="FILE", help="[RUN/report.html, or RUN/compare.html of the first]")
@command.json_option
def report(folders: tuple[str, ...], compare: bool, out: str | None, as_json: bool) -> None:
    """Draw a run's report, or compare several.

    It is one HTML file that needs nothing else.
    """
    from .report import write

    if compare and len(folders) < 2:
        raise click.UsageError("--compare needs two runs or more")
    if out is not None and len(folders) > 1 and not compare:
        raise click.UsageError("--out is one file: give one RUN, or --compare")
    pages = [folders] if compare else [(folder,) for folder in folders]
    found = [write(page, out)[1] for page in pages]
    if as_json:
        command.emit(found[0] if len(found) == 1 else found)
    for summary in found:
        command.say(f"report: {summary['report']}")


main.add_command(export)
main.add_command(sample)


def _as_override(processes: int | None) -> list[str]:
    return [] if processes is None else [f"processes={processes}"]


def _asked(
    context: click.Context, stop_after: int | None, fallback: bool, profile: str | None
) -> Start:
    from .run.request import Start, steps_between

    try:
        steps = steps_between(profile) if profile is not None else None
    except ValueError as error:
        raise click.UsageError(f"--profile: {error}") from None
    debug = bool(context.find_root().meta.get(command.DEBUG))
    return Start(stop_after=stop_after, fallback=fallback, profile=steps, debug=debug)


def _again(context: click.Context) -> list[str]:
    """The words of this command, for a batch job to say."""
    found = [context.info_name or ""]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if isinstance(parameter, click.Argument):
            found += value if isinstance(value, tuple) else [str(value)]
        elif value is True and parameter.name not in ("slurm", "dry_run", "as_json"):
            found.append(parameter.opts[0])
        elif value is not None and not isinstance(value, bool):
            found += [parameter.opts[0], str(value)]
    return found


def _go(
    job: Job,
    *,
    slurm: bool,
    stop_after: int | None,
    fallback: bool,
    profile: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Start the job here, or submit it as a batch job that says the words of this command."""
    from .cluster import ranks as group
    from .launch import preflight as checks
    from .launch import start

    context = click.get_current_context()
    asked = _asked(context, stop_after, fallback, profile)
    checks.check(job, elsewhere=slurm)
    words = _again(context) if slurm else None
    if dry_run:
        checks.check_disk(job)
        _describe(job, words, as_json)
        return
    if words is not None:
        number = start.submit(job, words)
        if as_json:
            command.emit({"job": number, "script": str(job.folder.slurm)})
        command.say(f"submitted as job {number}: {job.folder.slurm}")
        return
    code = start.start(job, asked)
    if as_json and group.speaks():
        command.emit(start.outcome(job, code))
    sys.exit(code)


def _describe(job: Job, words: list[str] | None, as_json: bool) -> None:
    from .costs.describe import configuration, describe, lines
    from .launch import start

    described = describe(job, activations=True)
    script = {} if words is None else {"slurm": start.batch_script(job, words)}
    if as_json:
        command.emit(described | script)
    else:
        told = [*lines(described), configuration(described), *script.values()]
        command.say("\n".join(told))


if __name__ == "__main__":
    main()
