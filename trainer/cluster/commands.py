"""Commands that other launchers start as ranks."""

from __future__ import annotations

from typing import Any

import click

from ...console import command
from .ranks import noting_failure, tell_failure


class RankCommandGroup(command.CommandGroup):
    """Commands of which some are ranks. The error of a rank is printed before others learn it."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        finally:
            tell_failure()


class RankCommand(command.Command):
    """A command that other launchers start as ranks. If it fails before the ranks have met, the
    others end with its error."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with noting_failure():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.params.get("dry_run"):  # no rank waits for it
            return super().invoke(ctx)
        with noting_failure():
            return super().invoke(ctx)
