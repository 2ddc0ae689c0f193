"""Command-line options of what a build does to documents, and their settings."""

from __future__ import annotations

from typing import Any

import click


def fim_options(function: Any) -> Any:
    """Add the options of fill-in-the-middle."""
    options = [
        click.option(
            "--fim",
            type=float,
            metavar="RATE",
            help="Rearrange this share of the documents for fill-in-the-middle.",
        ),
        click.option(
            "--fim-sentinels",
            metavar="PRE,SUF,MID[,EOT]",
            help="--fim: special tokens before the parts (and after the last one).",
        ),
        click.option(
            "--fim-spm",
            type=float,
            metavar="SHARE",
            help="--fim: share with the suffix first (0.5).",
        ),
        click.option(
            "--fim-seed", type=int, metavar="SEED", help="--fim: seed of the choices (0)."
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def fim_of(values: dict[str, Any]) -> dict[str, Any] | None:
    """Take the settings of fill-in-the-middle out of the options' values."""
    names = ("sentinels", "spm", "seed")
    given = {name: values.pop(f"fim_{name}") for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if values["fim"] is None:
        if given:
            raise click.UsageError(f"--fim-{next(iter(given))} needs --fim")
        return None
    if "sentinels" not in given:
        raise click.UsageError(
            "--fim needs --fim-sentinels PRE,SUF,MID: special tokens of the tokenizer, as in "
            "'<|fim_prefix|>,<|fim_suffix|>,<|fim_middle|>'"
        )
    return {"rate": values["fim"], **given, "sentinels": given["sentinels"].split(",")}
