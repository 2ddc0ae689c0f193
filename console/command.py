"""The conventions of every command: `--help`, `--debug`, `--json`, and the exit codes.

0 done, 1 failed, 2 misuse. What a program may read goes to stdout, everything else to stderr.
A person's mistake is an error without a traceback; `--debug` shows it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import click

from . import log
from .errors import UserError

DEBUG = "headrace.debug"

json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable on stdout.")


def overrides_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Trailing `dotted.path=value` words that override the YAML."""
    return click.argument("overrides", nargs=-1, metavar="[PATH.TO.KEY=VALUE]...")(function)


def emit(value: object) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, default=str))


def say(text: str) -> None:
    """Tell the person something, on stderr."""
    click.echo(text, err=True)


class CommandGroup(click.Group):
    """A command with subcommands: keeps the order in which they are written, prints errors."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:  # of a reader that went away, click makes a quiet exit
            if not _is_of_output(error):
                raise
            say(f"error: cannot write to stdout: {error.strerror}")
            # What stdout did not take is dropped: Python would try it once more at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # People add `--debug` at the end of the line that failed: it is understood anywhere.
        if ctx.parent is None:
            options = args[: args.index("--")] if "--" in args else args
            ctx.meta[DEBUG] = "--debug" in options
            args = [word for word in options if word != "--debug"] + args[len(options) :]
            if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
                ctx.color = False
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        debug = ctx.find_root().meta[DEBUG]
        log.setup(debug=debug)
        try:
            return super().invoke(ctx)
        except UserError as error:
            if debug:
                raise
            say(f"error: {error}")
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            say("interrupted")
            ctx.exit(130)


def _is_of_output(error: OSError) -> bool:
    """Whether it was raised where click prints."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return innermost.f_code is click.echo.__code__


def group(
    name: str, cls: type[CommandGroup] = CommandGroup
) -> Callable[[Callable[[], None]], CommandGroup]:
    """A command's root: the function's docstring is its help."""

    def decorate(function: Callable[[], None]) -> CommandGroup:
        from .. import __version__

        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        root: CommandGroup = click.group(cls=cls, name=name, context_settings=settings)(function)
        root.params.append(
            click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks.")
        )
        return click.version_option(__version__, prog_name=name)(root)

    return decorate
