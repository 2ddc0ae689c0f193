"""The `mixtures` command: plan the data of a run, and audit it afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console import command, page
from ..console.progress import exact_count
from .disclosure.cli import summary
from .exposure.cli import find
from .proof.cli import prove, verify
from .search.cli import search
from .steering.cli import steer

if TYPE_CHECKING:
    from .audit.auditor import Auditor

MAX_SHARES = 20
"""Documents listed with their shares of a step's loss."""
PLAN_ARGUMENT = "MIXTURE.yaml|PLAN.json|RUN"


@command.group("mixtures")
def main() -> None:
    """Plan the data of a run, and audit it afterwards.

    A mixture is a YAML file that names datasets, their shares and the phases of training. Its plan
    decides every row of a run.

    \b
    Examples:
      mixtures new s3://corpus/web s3://corpus/code --out mixture.yaml
      mixtures plan mixture.yaml

    More: docs/mixtures.md
    """


def keys() -> Iterator[str]:
    """Yield the paths of a mixture's keys."""
    from ..console.config import key_paths
    from .mixture_file.mixture import Mixture

    return key_paths(Mixture)


@main.command()
@click.argument("datasets", nargs=-1, metavar="[DATASET]...")
@click.option("--out", type=click.Path(), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@click.option(
    "--tokens", callback=command.token_count, metavar="N", help="Tokens of the run [all, once]."
)
@click.option("--seq-len", type=click.IntRange(2), metavar="N", help="Tokens of a row.")
@click.option("--batch", callback=command.token_count, metavar="N", help="Tokens of a step.")
@command.json_option
def new(
    datasets: tuple[str, ...], out: str | None, force: bool, as_json: bool, **sizes: int | None
) -> None:
    """Write a first mixture of some datasets, with comments, ready to edit.

    \b
    Examples:
      mixtures new s3://corpus/web s3://corpus/code --out mixture.yaml
      mixtures new data/web --tokens 20M --seq-len 512 --batch 16Ki

    More: docs/mixtures.md
    """
    from ..console import yaml_text
    from ..console.errors import StorageError
    from ..dataplane.storage import storage
    from .template import render_template

    if out is not None and Path(out).exists() and not force:
        raise StorageError(f"{out} already exists", hint="choose another --out, or add --force")
    text = render_template(datasets, **sizes)
    if out is not None:
        storage.write(out, text.encode())
        command.say(f"wrote {out}; next: mixtures plan {out}")
    if as_json:
        command.emit({"file": out, "mixture": yaml_text.parse(text, source="the mixture")[0]})
    elif out is None:
        click.echo(text, nl=False)


@main.command(keys=keys)
@click.argument("file", metavar="MIXTURE.yaml", type=click.Path())
@command.overrides_argument
@command.json_option
@click.pass_context
def check(ctx: click.Context, file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Report all problems of a mixture, with line numbers.

    Exits with 1 if there are any.

    \b
    Example:
      mixtures check mixture.yaml

    More: docs/mixtures.md
    """
    from ..console.errors import ConfigError, UserError
    from .planning.open_plan import open_plan

    try:
        plan = open_plan(file, overrides).plan
    except UserError as error:
        if not as_json:
            error.exit_code = 1  # this command reports problems, also those of overrides
            raise
        listed = error.problems if isinstance(error, ConfigError) else ()
        problems: list[dict[str, Any]] = [
            {"path": problem.path, "what": problem.message, "line": problem.line}
            for problem in listed
        ] or [{"path": "", "what": error.message, "line": None}]
        command.emit({"ok": False, "problems": problems})
        ctx.exit(1)
    if as_json:
        command.emit({"ok": True, "problems": [], "hash": plan.hash})
    else:
        click.echo(f"{file} has no problems: {plan.tokens:,} tokens, plan {plan.hash}")


@main.command(keys=keys)
@click.argument("file", metavar=PLAN_ARGUMENT, type=click.Path())
@command.overrides_argument
@click.option("--out", type=click.Path(), help="Save the plan as JSON.")
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="Speed of the run; adds the time of each phase and source.",
)
@command.json_option
def plan(
    file: str,
    overrides: tuple[str, ...],
    out: str | None,
    tokens_per_second: float | None,
    as_json: bool,
) -> None:
    """Show how many rows, tokens and epochs each source gets.

    \b
    Examples:
      mixtures plan mixture.yaml --tokens-per-second 3e6
      mixtures plan mixture.yaml phases.anneal.tokens=50B --out plan.json

    More: docs/mixtures.md
    """
    from .planning.open_plan import open_plan
    from .view.summary import summarize
    from .view.table import format_table, json_data

    opened = open_plan(file, overrides)
    summary = summarize(opened.stream, opened.branch, opened.sources)
    if out is not None:
        opened.plan.save(out)
        command.say(f"wrote {out}")
    if as_json:
        command.emit(json_data(summary, tokens_per_second))
    else:
        click.echo(format_table(summary, tokens_per_second))


@main.command(keys=keys)
@click.argument("file", metavar=PLAN_ARGUMENT, type=click.Path())
@command.overrides_argument
@click.option("--out", type=click.Path(), required=True, help="A .svg or .html file.")
@command.json_option
def plot(file: str, overrides: tuple[str, ...], out: str, as_json: bool) -> None:
    """Draw weights, learning rate, tokens and epochs over the tokens of a plan.

    \b
    Example:
      mixtures plot mixture.yaml --out mixture.svg

    More: docs/mixtures.md
    """
    from .planning.open_plan import open_plan
    from .view.curves import compute_curves
    from .view.plot import draw, find_format

    find_format(out)
    plan_curves = compute_curves(open_plan(file, overrides).stream)
    draw(plan_curves, out)
    if as_json:
        command.emit({"file": out, **plan_curves.json_data()})
    else:
        command.say(f"wrote {out}")


@main.command(keys=keys)
@click.argument("file", metavar=PLAN_ARGUMENT, type=click.Path())
@command.overrides_argument
@page.out_option
def card(file: str, overrides: tuple[str, ...], out: str | None) -> None:
    """Write a page about the data of a plan: phases, sources, shares, licences.

    `tokenize card` states the licences and the origin of a dataset.

    \b
    Example:
      mixtures card runs/first --out NAME.md

    More: docs/mixtures.md
    """
    from ..dataplane.storage import storage
    from .planning.open_plan import open_plan
    from .view.card import render_card

    text = render_card(open_plan(file, overrides).stream)
    if out is None:
        click.echo(text, nl=False)
        return
    storage.write(out, page.render_file(text, out))
    command.say(f"wrote {out}")


@main.command(keys=keys)
@click.argument("file", metavar=PLAN_ARGUMENT, type=click.Path())
@command.overrides_argument
@click.option("--rows", metavar="A:B", help="Show rows A to B, without B; or one row.")
@click.option("--step", type=click.IntRange(min=0), help="Show the rows of a step.")
@click.option("--decisions", is_flag=True, help="Show the shares that the run has decided.")
@click.option("--text", is_flag=True, help="Show the tokens as text.")
@click.option(
    "--out",
    metavar="ROWS.parquet",
    callback=command.local_path,
    help="Write the rows' documents there, without reading tokens.",
)
@command.json_option
def audit(
    file: str,
    overrides: tuple[str, ...],
    rows: str | None,
    step: int | None,
    decisions: bool,
    text: bool,
    out: str | None,
    as_json: bool,
) -> None:
    """Show what rows hold: source, epoch, documents and the hash of their tokens.

    For a run's folder, --step also proves the rows by the run's ledger, and shows the losses that
    the run recorded, by source and by document; --decisions shows the shares that it has decided,
    and repeats the decisions of controllers. `mixtures find` shows the rows of a document.

    \b
    Examples:
      mixtures audit runs/first --step 120000
      mixtures audit plan.json --rows 1000:1010 --text
      mixtures audit plan.json --rows 0:100000 --out rows.parquet

    More: docs/mixtures.md, section Audit
    """
    from ..console.errors import StorageError
    from .audit.auditor import Auditor
    from .audit.decisions import audit_decisions
    from .audit.export import export_rows
    from .audit.planned_rows import plan_rows
    from .planning.open_plan import open_plan

    if (rows is not None) + (step is not None) + decisions != 1:
        raise click.UsageError("give either --rows, --step or --decisions")
    span = _span(rows) if rows is not None else None
    opened = open_plan(file, overrides)
    if decisions:
        if opened.run is not None and not opened.plan.decisions:
            command.say(f"{file} has followed its plan: no decision changed its shares")
        for decision in audit_decisions(opened):
            click.echo(decision.format_json() if as_json else decision.format_text())
        return
    auditor = Auditor(opened, text=text)
    if out is not None:
        if span is None or text:
            raise click.UsageError("--out needs --rows, and contradicts --text")
        count = export_rows(auditor.reader, auditor.check_rows(span), Path(out))
        command.say(
            f"wrote {out}: {exact_count(count, 'pieces')} of documents in "
            f"{exact_count(len(span), 'rows')}"
        )
        return
    try:
        _print_rows(auditor, span, step, as_json)
    except StorageError:
        if span is None:
            span = auditor.find_rows(step or 0)
        command.say("the data of these rows cannot be read; by the plan alone:")
        for planned in plan_rows(opened.stream, auditor.check_rows(span)):
            click.echo(planned.format_json() if as_json else planned.format_text())
        raise


def _print_rows(auditor: Auditor, span: range | None, step: int | None, as_json: bool) -> None:
    """Print a step's rows, with what the run has recorded, or a range of rows."""
    from .audit.audit_rows import AuditedRow
    from .audit.recorded_losses import add_losses, find_recorded, list_shares
    from .audit.recorded_step import describe_recorded_step

    opened = auditor.opened
    audited: Iterable[AuditedRow]
    if step is not None:
        audited, proved = auditor.step(step)
        if proved and opened.run is not None:
            command.say(
                f"the {exact_count(len(audited), 'rows')} of step {step:,} match "
                "their hash in the ledger"
            )
            if metrics := describe_recorded_step(opened.run, step):
                command.say(metrics)
            if recorded := find_recorded(opened.run, step):
                audited = add_losses(audited, recorded)
                command.say("recorded losses of documents, the largest share of the step's first:")
                for share in list_shares(audited, recorded)[:MAX_SHARES]:
                    command.say(f"  {share.format_text()}")
        elif opened.ledger and auditor.has_taken(step):
            command.say(f"the ledger begins after step {step}: nothing proves the rows below")
        elif opened.ledger:
            command.say(f"the run has not reached step {step} yet; these rows are planned for it")
    else:
        assert span is not None
        audited = auditor.rows(span)
    for row in audited:
        click.echo(row.format_json() if as_json else row.format_text())


def _span(text: str) -> range:
    """Parse `A:B`, or one row."""
    first, colon, last = text.partition(":")
    if not first.isdecimal() or (colon and not last.isdecimal()):
        raise click.UsageError(f"--rows must be A:B or one number, not {text}")
    span = range(int(first), int(last) if colon else int(first) + 1)
    if not span:
        raise click.UsageError(f"--rows {text} is empty: A:B goes from A to B, without B")
    return span


main.add_command(find)
main.add_command(prove)
main.add_command(verify)
main.add_command(search)
main.add_command(steer)
main.add_command(summary)


if __name__ == "__main__":
    main()
