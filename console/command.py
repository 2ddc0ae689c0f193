"""Conventions of all commands: `--help`, `--debug`, `--json`, and exit codes.

Exit codes: 0 done, 1 failed, 2 misuse, 130 interrupted. Results go to stdout, everything else to
stderr. User errors are printed without a traceback; `--debug` shows it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Any

import click

from . import log
from .errors import UserError

DEBUG = "headrace.debug"

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


def overrides_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add trailing `dotted.path=value` arguments, which override values of the YAML."""
    return click.argument("overrides", nargs=-1, metavar="[PATH.TO.KEY=VALUE]...")(function)


def name_in(
    names: Callable[[], Collection[str]],
) -> Callable[[click.Context, click.Parameter, str], str]:
    """Return an option's callback that accepts the names of a table.

    The table is imported when a name is checked: `--help` stays fast.
    """

    def check(context: click.Context, parameter: click.Parameter, value: str) -> str:
        known = names()
        if value not in known:
            raise click.BadParameter(f"{value!r} is not one of {', '.join(map(repr, known))}.")
        return value

    return check


def emit(value: object) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, default=str))


def say(text: str) -> None:
    """Print a line for the user on stderr."""
    click.echo(text, err=True)


class CommandGroup(click.Group):
    """A command with subcommands: lists them in the order of their definition, prints errors."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:  # click itself handles a closed pipe
            if not _raised_by_echo(error):
                raise
            say(f"error: cannot write to stdout: {error.strerror}")
            # Drop the rest of the output: Python would try to write it again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # `--debug` works anywhere on the line: users add it at the end of a command that failed.
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


def _raised_by_echo(error: OSError) -> bool:
    """True if click raised the error while printing."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return innermost.f_code is click.echo.__code__


def group(
    name: str, cls: type[CommandGroup] = CommandGroup
) -> Callable[[Callable[[], None]], CommandGroup]:
    """Make a function the root of a command; its docstring is the help text."""

    def decorate(function: Callable[[], None]) -> CommandGroup:
        from .. import __version__

        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        root: CommandGroup = click.group(cls=cls, name=name, context_settings=settings)(function)
        root.params.append(
            click.Option(
                ["--debug"], is_flag=True, expose_value=False, help="Show tracebacks of errors."
            )
        )
        return click.version_option(__version__, prog_name=name)(root)

    return decorate
