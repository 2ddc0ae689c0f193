"""The command `trainer documents`."""

from __future__ import annotations

import click

from ...console import command


@click.command(cls=command.Command)
@click.argument("run", metavar="RUN")
@click.option(
    "--worst",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Documents (or groups) to list.",
)
@click.option("--by", metavar="source|FIELD", help="Group the worst documents.")
@command.json_option
def documents(run: str, worst: int, by: str | None, as_json: bool) -> None:
    """Rank the documents of a run by loss, beside that of their source at that time.

    Each step records its documents with the largest share of the loss; a spike or a skipped step,
    all of them. A document stands at its worst piece: loss above the source's (the median of its
    means in nine steps), times the root of its tokens. --by groups the worst documents by source or
    by a kept field.

    \b
    Examples:
      trainer documents runs/first --worst 50
      trainer documents runs/first --by language

    More: docs/mixtures.md, section Audit
    """
    from . import table
    from . import worst as ranking

    ranked = ranking.rank_documents(run, worst)
    if by is None:
        listed = [document.json_data() for document in ranked[:worst]]
        text = table.format_documents(listed)
    else:
        listed = [group.json_data() for group in ranking.group_documents(ranked, by)[:worst]]
        text = table.format_groups(listed, by)
    if as_json:
        command.emit(listed)
    else:
        click.echo(text)
