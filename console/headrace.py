"""`headrace`: the umbrella command; its subcommands are imported when they are used.

This is the one file that names the modules of all folders.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from .command import CommandGroup, group

COMMANDS = {
    "tokenize": ("..tokenize.cli", "Build token datasets from corpora."),
    "mixtures": ("..mixtures.cli", "Plan the data of a run: sources, phases, weights; audit it."),
    "trainer": ("..trainer.cli", "Start, resume and report runs."),
    "models": ("..models.cli", "Show, count and convert models."),
    "bench": ("..trainer.measure.cli", "Measure blocks and collectives on this machine."),
    "doctor": (".doctor", "Check this machine: versions, devices, missing packages."),
    "config": ("..trainer.config_key", "Explain a key of a run, a mixture or a model."),
    "recipes": ("..trainer.recipes", "List models, runs and mixtures that fit together."),
    "completion": (".completion", "Complete commands, options and paths in the shell."),
    "demo": ("..trainer.demo", "Run the whole pipeline at small size, from corpus to model."),
}
"""Module and summary of each subcommand. The module's `main` is the click command."""


class LazyGroup(CommandGroup):
    """A group of the subcommands in COMMANDS; listing them imports none of their modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[name][0], __package__).main
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@group("headrace", cls=LazyGroup)
def main() -> None:
    """Pretrain models, with the data stream first.

    `tokenize` builds datasets from corpora, `mixtures` plans the stream of a run, and `trainer`
    trains a model on it.

    \b
    Examples:
      headrace doctor
      headrace tokenize build corpus/*.jsonl --out data/web --tokenizer byte
      headrace mixtures plan mixture.yaml

    More: README.md; each command names its own page
    """
    click.get_current_context().obj = find_engine_state


def find_engine_state(*arguments: Any) -> Any:
    """State of an engine, for `headrace models show`: models/ cannot import the engines."""
    return import_module("..trainer.costs.parameters", __package__).find_engine_state(*arguments)


if __name__ == "__main__":
    main()
