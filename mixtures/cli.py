"""`mixtures`: what a run will see, and what it saw."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from ..console import command

TARGET = "FILE|PLAN.json|RUN"


@command.group("mixtures")
def main() -> None:
    """Plan what is trained on, see what it does, and prove what it did."""


@main.command()
@click.argument("datasets", nargs=-1, metavar="[DATASET]...")
@click.option("--out", type=click.Path(), help="Write to a file instead of stdout.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@command.json_option
def new(datasets: tuple[str, ...], out: str | None, force: bool, as_json: bool) -> None:
    """Write a mixture of some datasets, with comments, ready to edit."""
    from ..console import yaml_text
    from ..console.errors import StorageError
    from ..dataplane.storage import storage
    from .template import template

    if out is not None and Path(out).exists() and not force:
        raise StorageError(f"{out} exists already", hint="choose another --out, or add --force")
    text = template(datasets)
    if out is not None:
        storage.write(out, text.encode())
        command.say(f"wrote {out}; next: mixtures plan {out}")
    if as_json:
        command.emit({"file": out, "mixture": yaml_text.parse(text, source="the mixture")[0]})
    elif out is None:
        click.echo(text, nl=False)


@main.command()
@click.argument("file", type=click.Path())
@command.overrides_argument
@command.json_option
@click.pass_context
def check(ctx: click.Context, file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say everything that is wrong with a mixture."""
    from ..console.errors import ConfigError, UserError
    from .planning.open_plan import open_plan

    try:
        plan = open_plan(file, overrides).plan
    except UserError as error:
        if not as_json:
            raise
        found = error.problems if isinstance(error, ConfigError) else ()
        problems: list[dict[str, Any]] = [
            {"path": problem.path, "what": problem.what, "line": problem.line} for problem in found
        ] or [{"path": "", "what": error.what, "line": None}]
        command.emit({"ok": False, "problems": problems})
        ctx.exit(1)
    if as_json:
        command.emit({"ok": True, "problems": [], "hash": plan.hash})
    else:
        click.echo(f"{file} is sound: {plan.tokens:,} tokens, plan {plan.hash}")


@main.command()
@click.argument("file", metavar=TARGET, type=click.Path())
@command.overrides_argument
@click.option("--out", type=click.Path(), help="Save the plan as JSON.")
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="The run's speed: shows the time that each phase and source takes.",
)
@command.json_option
def plan(
    file: str,
    overrides: tuple[str, ...],
    out: str | None,
    tokens_per_second: float | None,
    as_json: bool,
) -> None:
    """Show how many rows, tokens and epochs each source gets."""
    from .planning.open_plan import open_plan
    from .view.summary import summarize
    from .view.table import as_data, table

    target = open_plan(file, overrides)
    summary = summarize(target.stream, target.branch)
    if out is not None:
        target.plan.save(out)
        command.say(f"wrote {out}")
    if as_json:
        command.emit(as_data(summary, tokens_per_second))
    else:
        click.echo(table(summary, tokens_per_second))


@main.command()
@click.argument("file", metavar=TARGET, type=click.Path())
@command.overrides_argument
@click.option("--out", type=click.Path(), required=True, help="A .png, .svg or .html file.")
@command.json_option
def plot(file: str, overrides: tuple[str, ...], out: str, as_json: bool) -> None:
    """Draw weights, learning rate, tokens and epochs over the tokens of a plan."""
    from .planning.open_plan import open_plan
    from .view.curves import curves
    from .view.plot import draw, kind_of

    kind_of(out)
    found = curves(open_plan(file, overrides).stream)
    draw(found, out)
    if as_json:
        command.emit({"file": out, **found.as_data()})
    else:
        command.say(f"wrote {out}")


@main.command()
@click.argument("file", metavar=TARGET, type=click.Path())
@command.overrides_argument
@click.option("--rows", metavar="A:B", help="Rows A up to, not including, B; or one row.")
@click.option("--step", type=click.IntRange(min=0), help="The rows of an update.")
@click.option("--document", metavar="ID", help="The rows of a document, by its number or its id.")
@click.option("--source", metavar="NAME", help="Look for the document in this source alone.")
@click.option("--text", is_flag=True, help="Show the tokens as text.")
@command.json_option
def audit(
    file: str,
    overrides: tuple[str, ...],
    rows: str | None,
    step: int | None,
    document: str | None,
    source: str | None,
    text: bool,
    as_json: bool,
) -> None:
    """Show what rows hold: source, epoch, documents and their tokens' hash.

    Of a run's folder, --step also proves that the rows hash to what the run's ledger says, and
    shows the losses that the run recorded.
    With --document: at which rows a document was, or will be, seen.
    """
    from .audit.audit_rows import AuditedRow
    from .audit.auditor import Auditor
    from .audit.recorded_step import describe_recorded_step
    from .planning.open_plan import open_plan

    if [rows, step, document].count(None) != 2:
        raise click.UsageError("name one of --rows, --step and --document")
    if source is not None and document is None:
        raise click.UsageError("--source belongs to --document")
    span = _span(rows) if rows is not None else None
    target = open_plan(file, overrides)
    seen: Iterable[AuditedRow]
    auditor = Auditor(target, text=text)
    if document is not None:
        for found in auditor.find(document, source):
            for line in found.as_json() if as_json else [found.as_text()]:
                click.echo(line)
        return
    if step is not None:
        seen, proven = auditor.step(step)
        if proven and target.run is not None:
            command.say(f"the {len(seen)} rows of step {step:,} hash to what the ledger says")
            if came_to := describe_recorded_step(target.run, step):
                command.say(came_to)
        elif target.ledger:
            command.say(f"the run has not taken step {step} yet: this is what it will see")
    else:
        assert span is not None
        seen = auditor.rows(span)
    for row in seen:
        click.echo(row.as_json() if as_json else row.as_text())


def _span(text: str) -> range:
    """`A:B`, or one row."""
    first, colon, last = text.partition(":")
    if not first.isdecimal() or (colon and not last.isdecimal()):
        raise click.UsageError(f"--rows is A:B or one number, not {text}")
    span = range(int(first), int(last) if colon else int(first) + 1)
    if not span:
        raise click.UsageError(f"--rows {text} is no row: the second number is one past the last")
    return span


if __name__ == "__main__":
    main()
