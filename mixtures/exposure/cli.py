"""The command `mixtures find`."""

from __future__ import annotations

import json
from itertools import islice

import click

from ...console import command

ECHO_ANSWERS = 256
"""Answers printed together."""


@click.command(cls=command.Command)
@click.argument("runs", nargs=-1, required=True, metavar="RUN|PLAN.json|MIXTURE.yaml...")
@click.option(
    "--documents",
    multiple=True,
    metavar="ID,...|FILE",
    help="Ids in the corpus, a file of ids, or `number:N`. Repeatable.",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="FILE",
    help="A file with the whole text of a document. Repeatable.",
)
@click.option("--source", metavar="NAME", help="Search this source only.")
@command.json_option
def find(
    runs: tuple[str, ...],
    documents: tuple[str, ...],
    texts: tuple[str, ...],
    source: str | None,
    as_json: bool,
) -> None:
    """Show where documents were trained on: by which runs, in which rows, steps and checkpoints.

    For each document: all rows of the run, and of the runs that it continues. A document without
    rows was not trained on.

    \b
    A FILE of ids has one id a line, or a column `id` (.jsonl, .parquet).

    \b
    Examples:
      mixtures find runs/first --documents web-17,web-18
      mixtures find runs/* --documents opt-outs.txt --json > seen.jsonl
      mixtures find runs/first --source web --documents number:17
      mixtures find runs/first --text letter.txt

    More: docs/mixtures.md, section Find
    """
    from .answers import DocumentAnswer, RunSummary
    from .find import Finder
    from .lineage import open_lineages
    from .request import parse_request

    if not documents and not texts:
        raise click.UsageError("give --documents or --text")
    finder = Finder(parse_request(documents, texts), source)
    lineages, summaries = open_lineages(runs), []
    for lineage in lineages:
        click.echo(lineage.format_json() if as_json else lineage.format_text())
        summary, answers = RunSummary(), finder.find(lineage)
        while batch := list(islice(answers, ECHO_ANSWERS)):
            lines = (answer.format_json() if as_json else answer.format_text() for answer in batch)
            click.echo("\n".join(lines))
            for answer in batch:
                if isinstance(answer, DocumentAnswer):
                    summary.add(answer)
        summaries.append(summary)
    for key in finder.request.list_keys():
        if key not in finder.matched_keys:
            if as_json:
                click.echo(json.dumps({"asked": key, "in_no_dataset": True}))
            could = "could be searched" if finder.is_partial else "these runs drew from"
            command.say(f"{key}: in no dataset that {could}")
    for lineage, summary in zip(lineages, summaries, strict=True):
        command.say(summary.format_text(lineage.name))
