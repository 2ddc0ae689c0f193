"""The command `trainer board`."""

from __future__ import annotations

import click

from ...console import command


@click.command(cls=command.Command)
@click.argument("places", nargs=-1, metavar="[FOLDER|URL]...")
@click.option("--port", type=click.IntRange(0, 65535), help="Port of this machine [8688, or free].")
@command.json_option
def board(places: tuple[str, ...], port: int | None, as_json: bool) -> None:
    """Serve a live page of all runs in and below folders or URLs [runs], on this machine alone.

    Curves with zoom, the rows of a step with their documents, the mixture, settings side by side,
    checkpoints. The page loads nothing from elsewhere. From another machine, open it through a
    tunnel: ssh -L 8688:127.0.0.1:8688 HOST

    \b
    Example:
      trainer board runs s3://bucket/runs

    More: docs/board.md
    """
    from .serve import serve

    serve(places or ("runs",), port, as_json=as_json)
