"""The command `trainer`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ..console import command

if TYPE_CHECKING:
    from .job import Job


@command.group("trainer")
def main() -> None:
    """Train a model on a mixture; go on where it stopped; report what it did."""


stop_option = click.option(
    "--stop-after",
    type=click.IntRange(1),
    metavar="STEP",
    help="Interrupt the run after so many steps of the plan, as a scheduler would.",
)
fallback_option = click.option(
    "--fallback",
    is_flag=True,
    help="Go on from the checkpoint before, if the newest is damaged.",
)
dry_option = click.option(
    "--dry-run", is_flag=True, help="Resolve, check and print everything; start nothing."
)


@main.command()
@click.argument("arguments", nargs=-1, metavar="[RUN.yaml] [PATH.TO.KEY=VALUE]...")
@click.option("--mixture", metavar="FILE", help="The mixture's YAML.")
@click.option("--model", metavar="NAME|FILE", help="A shipped model or a YAML [tiny-hybrid].")
@click.option("--out", metavar="FOLDER", help="The run's folder [runs/NAME].")
@click.option("--processes", type=click.IntRange(1), help="Processes on this machine.")
@stop_option
@fallback_option
@dry_option
@command.json_option
@click.pass_context
def run(
    context: click.Context,
    arguments: tuple[str, ...],
    mixture: str | None,
    model: str | None,
    out: str | None,
    processes: int | None,
    stop_after: int | None,
    fallback: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Start a run; the same command restarts and resumes it.

    Overrides go to the run's own keys; those that begin with `mixture.` or `model.` go into these
    files. Exit codes: 0 finished, 85 saved and stopped early (start it again), 1 failed.
    """
    from . import job as jobs

    overrides = [word for word in arguments if "=" in word]
    files = [word for word in arguments if "=" not in word]
    if len(files) > 1:
        raise click.UsageError(f"one RUN.yaml at most, not {', '.join(files)}")
    if processes is not None:
        overrides.append(f"processes={processes}")
    request = jobs.Request(
        run=files[0] if files else None,
        mixture=mixture,
        model=model,
        out=out,
        overrides=overrides,
    )
    job = jobs.resolve(request)
    _go(context, job, stop_after, fallback, dry_run, as_json)


@main.command()
@click.argument("folder", metavar="RUN")
@command.overrides_argument
@stop_option
@fallback_option
@dry_option
@command.json_option
@click.pass_context
def resume(
    context: click.Context,
    folder: str,
    overrides: tuple[str, ...],
    stop_after: int | None,
    fallback: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Go on with the run in the folder RUN; nothing else is needed."""
    from . import job as jobs
    from .folder import RunFolder

    job = jobs.load(RunFolder(folder), overrides)
    _go(context, job, stop_after, fallback, dry_run, as_json)


@main.command()
@click.argument("folders", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", metavar="FILE", help="Where the report goes [RUN/report.html].")
@command.json_option
def report(folders: tuple[str, ...], out: str | None, as_json: bool) -> None:
    """Draw a run's report, one HTML file that needs nothing else; several runs are compared."""
    from .report import write

    path, summary = write(folders, out)
    if as_json:
        command.emit(summary)
    else:
        command.say(f"report: {path}")


def _go(
    context: click.Context,
    job: Job,
    stop_after: int | None,
    fallback: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    from . import launch, start
    from .describe import describe, lines

    start.check(job)
    described = describe(job)
    if dry_run:
        if as_json:
            command.emit(described)
        else:
            command.say("\n".join(lines(described)))
        return
    code = start.start(job, stop_after=stop_after, fallback=fallback, debug=_debug(context))
    if as_json and launch.speaks():
        command.emit(start.outcome(job, code))
    sys.exit(code)


def _debug(context: click.Context) -> bool:
    return bool(context.find_root().meta.get(command.DEBUG))


if __name__ == "__main__":
    main()
