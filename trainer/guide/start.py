"""`headrace start`: from a folder of documents to a trained model in a given time.

    documents ─ tokenize ─► dataset ─ trials ─► model, layout, tokens ─ mixtures, trainer ─► run

It decides; the ordinary commands work, each printed before it runs. Their files in the folder OUT
are its state: a start that was stopped goes on from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...console import command


@click.command()
@click.argument("folder")
@click.option(
    "--hours",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Time for trials and training.",
)
@click.option(
    "--weights",
    metavar="FOLDER",
    callback=command.local_path,
    help="Train these weights further: a folder of transformers, with its tokenizer.",
)
@click.option(
    "--out", metavar="OUT", callback=command.local_path, help="Folder for all files [runs/NAME]."
)
@click.option("--text-field", metavar="NAME", help="Field or column of the text [text].")
@click.option("--input-format", metavar="FORMAT", help="Format of all files [by their endings].")
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    help="Stop at a bad record, or leave it out.",
)
@click.option("--board/--no-board", default=True, help="Serve the live page meanwhile.")
@click.pass_context
def main(ctx: click.Context, /, folder: str, out: str | None, **options: Any) -> None:
    """Train on a folder of documents: tokenize, choose a model, train it, show the board.

    The model is the largest that this machine can train in the given time: short trials measure
    its steps. Text gets a tokenizer of its own, FASTA is read as bytes, and a folder of chats
    (records with `messages`) becomes a fine-tuning of --weights. Each command is printed before it
    runs. A start that was stopped goes on when it is started again.

    \b
    Examples:
      headrace start corpus --hours 2
      headrace start chats --weights Llama-3.2-1B --hours 2

    More: docs/start.md
    """
    from .start_run import Start

    corpus = Path(folder).resolve()
    out = out or str(Path("runs") / (corpus.stem if corpus.is_file() else corpus.name))
    ctx.exit(Start(folder=folder, out=Path(out), **options).run())
