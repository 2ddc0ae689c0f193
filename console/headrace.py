"""`headrace`: every command of the house behind one name.

The one file that knows all rooms, by their names: each is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from .command import CommandGroup, group

ROOMS = {
    "tokenize": ("..tokenize.cli", "Corpora in, token datasets out."),
    "mixtures": ("..mixtures.cli", "Plans of what is trained on: sources, phases, weights."),
    "trainer": ("..trainer.cli", "Runs: start, resume, report."),
    "models": ("..models.cli", "The shipped models, and exact counts of any."),
    "doctor": (".doctor", "What this machine has, what will be used, what is missing."),
    "demo": ("..trainer.demo", "The whole way at small size: corpus to trained model."),
}
"""What each command is, and the module whose `main` it is."""


class House(CommandGroup):
    """Knows its commands by the table: a list of them needs none of their modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(ROOMS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in ROOMS:
            return None
        command: click.Command = import_module(ROOMS[name][0], __package__).main
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in ROOMS.items()])


@group("headrace", cls=House)
def main() -> None:
    """Pretraining with the data stream first.

    Tokenizers write datasets, mixtures plan the stream, the trainer turns it into models.
    """
    click.get_current_context().obj = find_engine_state


def find_engine_state(*arguments: Any) -> Any:
    """State of an engine, for `headrace models show`: models/ cannot import the engines."""
    return import_module("..trainer.costs.state", __package__).find_engine_state(*arguments)


if __name__ == "__main__":
    main()
