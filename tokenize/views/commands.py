"""`tokenize select`, `tokenize pack` and `tokenize sort`: the commands that make views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from ...console import command
from .. import options
from ..builder.options import apply_options

if TYPE_CHECKING:
    from ...dataplane.datasets.manifest import Manifest

LONG = ("cut", "drop", "keep-first")
"""Rules for documents longer than a bin."""


def pack_options(function: Any) -> Any:
    """Add the options for a packed view that is made with its dataset."""
    click_options = [
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
    return apply_options(click_options, function)


def _parse_lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text} is neither a number nor a list 512,1024") from None


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
    from .select import SelectConfig, describe_share
    from .select import select as make

    _make_views(SelectConfig, values, lambda c: {c.out: make(c)}, describe_share, as_json=as_json)


@click.command()
@click.argument("dataset", metavar="URL")
@click.option(
    "--length",
    callback=lambda _context, _option, text: _parse_lengths(text),
    required=True,
    metavar="TOKENS[,…]",
    help="Tokens of a bin; with several lengths, a view of each, at OUT/LENGTH.",
)
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

    With several lengths, a document lies in the shortest row that holds it, or in the gap of a
    longer one: for `steps_by_length` of a mixture.

    \b
    Example:
      tokenize pack data/web --length 4096 --out data/web-4096
      tokenize pack data/web --length 512,1024,2048,4096 --out data/web-lengths

    More: docs/tokenize.md, section Packing
    """
    from ...dataplane.datasets.packing import describe
    from .pack import PackConfig, pack_lengths
    from .pack import pack as make

    lengths = values.pop("length")
    values["length"] = max(lengths)
    if len(lengths) == 1:
        _make_views(PackConfig, values, lambda c: {c.out: make(c)}, describe, as_json=as_json)
    else:
        values["lengths"] = lengths
        _make_views(PackConfig, values, pack_lengths, describe, as_json=as_json)


@click.command()
@click.argument("dataset", metavar="URL")
@click.option("--by", required=True, metavar="FIELD", help="A kept field, or tokens.")
@click.option("--out", required=True, metavar="URL", help="Folder or URL of the sorted view.")
@options.executor_options
@command.json_option
def sort(as_json: bool, **values: Any) -> None:
    """Make a sorted view: all documents in the order of a kept field, without tokens of its own.

    For `order` of a mixture's source. Documents without a value come last.

    \b
    Example:
      tokenize sort data/web --by score --out data/web-by-score

    More: docs/tokenize.md, section Views
    """
    from .sort import SortConfig, describe_order
    from .sort import sort as make

    _make_views(SortConfig, values, lambda c: {c.out: make(c)}, describe_order, as_json=as_json)


def _make_views(
    config_type: Any,
    values: dict[str, Any],
    make: Callable[[Any], Mapping[str, Manifest | None]],
    describe: Callable[[Manifest], str],
    *,
    as_json: bool,
) -> None:
    """Make the view of a dataset. If the URL holds a build's splits, make a view of each split, at
    OUT/train and OUT/NAME."""
    from ...dataplane.datasets.manifest import list_splits
    from ...dataplane.storage import storage
    from ..inspect import summary

    dataset, out = values.pop("dataset"), values.pop("out").rstrip("/")
    data = {"engine": options.pop_executor(values), **values}
    outs: list[str] = []
    for split, url in list_splits(dataset.rstrip("/")).items():
        view_url = storage.join(out, split) if split else out
        views = make(options.build_checked(config_type, {**data, "dataset": url, "out": view_url}))
        for made_url, manifest in views.items():
            if manifest is not None:
                outs.append(made_url)
            if not as_json:
                empty = "no document is left, so nothing is written"
                text = empty if manifest is None else describe(manifest)
                command.say(f"{made_url}: {text}")
    if as_json:
        summaries = [summary(url) for url in outs]
        command.emit(summaries if len(summaries) > 1 else summaries[0])
