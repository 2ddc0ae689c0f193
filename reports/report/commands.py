"""The commands `trainer report` and `trainer list`."""

from __future__ import annotations

from dataclasses import asdict

import click

from ...console import command


@click.command(cls=command.Command)
@click.argument("folders", nargs=-1, required=True, metavar="RUN...")
@click.option("--compare", is_flag=True, help="Draw the runs side by side on one page.")
@click.option(
    "--out",
    metavar="FILE",
    callback=command.local_path,
    help="The page [RUN/report.html; --compare: RUN/compare.html].",
)
@command.json_option
def report(folders: tuple[str, ...], compare: bool, out: str | None, as_json: bool) -> None:
    """Draw the report of a run, or compare several runs.

    A report is one HTML file that loads nothing else. It can be drawn on any machine, and while
    the run is going.

    \b
    Example:
      trainer report runs/anneal runs/other --compare

    More: docs/trainer.md
    """
    from .write import write_report

    if compare and len(folders) < 2:
        raise click.UsageError("--compare needs two runs or more")
    if out is not None and len(folders) > 1 and not compare:
        raise click.UsageError("--out is one file: give one RUN, or --compare")
    pages = [folders] if compare else [(folder,) for folder in folders]
    summaries = [write_report(page, out)[1] for page in pages]
    if as_json:
        command.emit(summaries[0] if len(summaries) == 1 else summaries)
    for summary in summaries:
        command.say(f"report: {summary['report']}")


@click.command("list", cls=command.Command)
@click.argument("places", nargs=-1, metavar="[FOLDER]...")
@command.json_option
def list_command(places: tuple[str, ...], as_json: bool) -> None:
    """List the runs in and below folders [runs]: status, step, loss, speed, last checkpoint.

    A run that is going is listed as well. "not started" is a run without an event; "killed" is a
    run whose process on this machine ended and wrote no end; "unscored" is a run that has taken all
    of its steps and has yet to score its last checkpoint.

    \b
    Example:
      trainer list runs /scratch/ablations

    More: docs/trainer.md
    """
    from . import listing

    runs = [listing.scan_run(folder) for folder in listing.find_runs(places or ("runs",))]
    if as_json:
        command.emit([asdict(run) for run in runs])
    else:
        click.echo(listing.table(runs))
