"""Commands that external launchers start as ranks."""

from __future__ import annotations

from typing import Any

import click

from ...console import command
from .ranks import recording_failure, report_failure


class RankCommandGroup(command.CommandGroup):
    """Group with commands that may run as ranks. A rank prints its error before it reports it."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        finally:
            report_failure()


class RankCommand(command.Command):
    """Command that external launchers start as ranks. If it fails before the rendezvous, all ranks
    end with its error."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with recording_failure():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.params.get("dry_run"):  # no rank waits for it
            return super().invoke(ctx)
        with recording_failure():
            return super().invoke(ctx)
