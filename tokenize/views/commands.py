"""`tokenize select` and `tokenize pack`: the commands that make views."""

from __future__ import annotations

from typing import Any

import click

from ...console import command
from .. import options
from ..build.options import apply_options

LONG = ("cut", "drop", "keep-first")
"""Rules for documents that are longer than a bin."""


def pack_options(function: Any) -> Any:
    """Add the options of a packed view that is made with its dataset."""
    settings = [
        click.option(
            "--pack",
            type=click.IntRange(min=2),
            metavar="TOKENS",
            help="Also make a packed view with bins of this length, at OUT/packed-TOKENS.",
        ),
        click.option(
            "--pack-long",
            type=click.Choice(LONG),
            help="--pack: cut longer documents (the default), drop them, or keep one bin.",
        ),
    ]
    return apply_options(settings, function)


@click.command()
@click.argument("dataset", metavar="URL")
@click.option("--where", required=True, metavar="EXPRESSION", help="Documents that the view has.")
@click.option("--out", required=True, metavar="URL", help="Folder or URL of the view.")
@options.executor_options
@command.json_option
def select(as_json: bool, **values: Any) -> None:
    """Make a view: a dataset of some documents of another one, without tokens of its own.

    An expression over kept fields (`tokenize build --keep`), `tokens`, `id`, `file`, `position` and
    `document` chooses the documents.

    \b
    Example:
      tokenize select data/web --where "language == 'en' and score >= 0.8" --out data/web-en

    More: docs/tokenize.md, section Views
    """
    from .select import SelectConfig, share_of
    from .select import select as make

    data = {"engine": options.executor_of(values), **values}
    held = make(options.checked(SelectConfig, data))
    if as_json:
        from ..inspect import summary

        command.emit(summary(values["out"]))
        return
    command.say(f"{values['out']}: {share_of(held)}")


@click.command()
@click.argument("dataset", metavar="URL")
@click.option("--length", type=int, required=True, metavar="TOKENS", help="Tokens of a bin.")
@click.option("--out", required=True, metavar="URL", help="Folder or URL of the packed view.")
@click.option(
    "--long",
    type=click.Choice(LONG),
    default="cut",
    show_default=True,
    help="Cut longer documents into pieces, leave them out, or keep the tokens of one bin.",
)
@options.executor_options
@command.json_option
def pack(as_json: bool, **values: Any) -> None:
    """Make a packed view: rows of whole documents, without tokens of its own.

    Best-fit decreasing puts documents into bins of the given length, which are the rows of phases
    with this sequence length. Padding fills a bin; it has no weight in the loss.

    \b
    Example:
      tokenize pack data/web --length 4096 --out data/web-4096

    More: docs/tokenize.md, section Packing
    """
    from ...dataplane.datasets.packing import describe
    from .pack import PackConfig
    from .pack import pack as make

    data = {"engine": options.executor_of(values), **values}
    held = make(options.checked(PackConfig, data))
    if as_json:
        from ..inspect import summary

        command.emit(summary(values["out"]))
        return
    command.say(f"{values['out']}: {describe(held)}")
