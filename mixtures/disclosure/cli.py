"""The command `mixtures summary`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import click

from ...console import command, page

TEMPLATES = ("eu", "croissant", "cyclonedx", "spdx")


@click.command(cls=command.Command)
@click.argument("run", metavar="RUN|PLAN.json|MIXTURE.yaml")
@click.option(
    "--template",
    type=click.Choice(TEMPLATES),
    default="eu",
    show_default=True,
    help="The page that the law asks for, or the same facts as Croissant, CycloneDX or SPDX JSON.",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="Of the weights after so many steps, as a checkpoint is named [the newest].",
)
@click.option("--statement", metavar="FILE.yaml", help="What only the model's provider knows.")
@click.option(
    "--new-statement",
    metavar="FILE.yaml",
    callback=command.local_path,
    help="Write a first statement there, to fill in.",
)
@click.option(
    "--out", metavar="FILE.md|.html|.json", help="Write to this file, in the form of its ending."
)
@command.json_option
def summary(
    run: str,
    template: str,
    step: int | None,
    statement: str | None,
    new_statement: str | None,
    out: str | None,
    as_json: bool,
) -> None:
    """Summarize what a run's weights were trained on, as laws and inventories ask it.

    `eu` answers the template of the European Union for the public summary of training content.
    Languages, domain names and dates are counted over the documents that the weights have seen, by
    the fields that the datasets keep. What is not known stays empty and says what would fill it.

    \b
    Examples:
      mixtures summary runs/first --new-statement mill.yaml
      mixtures summary runs/first --statement mill.yaml --out summary.html
      mixtures summary runs/first --template cyclonedx --statement mill.yaml --out bom.json

    More: docs/mixtures.md, section Summary
    """
    from ...console.config import load
    from ...dataplane.storage import storage
    from .facts import gather_facts, list_sources
    from .statement import Statement, render_statement

    if new_statement is not None:
        if statement or out:
            raise click.UsageError("--new-statement contradicts --statement and --out")
        if storage.exists(str(new_statement)):
            raise click.UsageError(f"{new_statement} exists already")
        storage.write(str(new_statement), render_statement(list_sources(run)).encode())
        command.say(f"wrote {new_statement}")
        return
    endings = (".json",) if template != "eu" else (*page.ENDINGS, ".json")
    if out is not None and not out.lower().endswith(endings):
        raise click.BadParameter(f"{out} does not end in {' or '.join(endings)}")
    stated = Statement() if statement is None else load(Statement, statement)
    facts = gather_facts(run, stated, statement or "the statement", step)
    data, text, missing = _render(facts, template)
    if out is None:
        click.echo(json.dumps(data, indent=1) if as_json or text is None else text, nl=True)
    else:
        is_json = text is None or out.lower().endswith(".json")
        content = (
            json.dumps(data, indent=1).encode() if is_json else page.render_file(str(text), out)
        )
        storage.write(out, content)
        command.say(f"wrote {out}")
        if as_json:
            command.emit({"file": out, "missing": missing})
    if missing:
        command.say(f"{missing} answers are missing; each says what would fill it")
    for source in facts.sources:
        if source.problem is not None:
            command.say(f"the documents of {source.name} were not counted: {source.problem}")


def _render(facts: Any, template: str) -> tuple[dict[str, Any], str | None, int]:
    """Return a summary as data and, if it is a page, as Markdown; and the number of empty
    answers."""
    from .croissant import render_croissant
    from .cyclonedx import render_cyclonedx
    from .eu import eu_data, render_eu, summarize_for_eu
    from .sections import count_missing
    from .spdx import render_spdx

    if template == "croissant":
        return render_croissant(facts), None, 0
    if template == "cyclonedx":
        return render_cyclonedx(facts), None, 0
    if template == "spdx":
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return render_spdx(facts, created=now), None, 0
    sections = summarize_for_eu(facts, max_rows=None)
    return eu_data(facts, sections), render_eu(facts), count_missing(sections)
