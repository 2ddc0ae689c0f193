"""Conventions of all commands: `--help`, `--debug`, `--json`, and exit codes.

Exit codes: 0 done, 1 failed, 2 misuse, 130 interrupted. Misuse means that the command line itself
is wrong: an unknown option or key, a missing argument, a value that its option or key cannot have,
arguments that contradict each other or the kind of their inputs. Everything else that fails is 1.

Results go to stdout, everything else to stderr. User errors are printed without a traceback;
`--debug` shows it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import import_module
from typing import Any

import click

from . import log
from .errors import FILE_FAULTS, HINT, MissingError, StorageError, UserError, file_fault

DEBUG = "headrace.debug"
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
TRAINING = ("torch", "triton", "deepspeed", "safetensors", "tensorboard")
"""Packages of the extra `train`, which machines that only build datasets lack."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


def overrides_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add trailing `dotted.path=value` arguments, which override values of the YAML."""
    return click.argument(
        "overrides", nargs=-1, metavar="[PATH.TO.KEY=VALUE]...", callback=_checked_overrides
    )(function)


def _checked_overrides(
    context: click.Context, parameter: click.Parameter, words: tuple[str, ...]
) -> tuple[str, ...]:
    check_overrides(words)
    return words


def check_overrides(words: Sequence[str]) -> None:
    """Raise for a word without `=`, such as `optimizer.lr` in `optimizer.lr 1e-3`."""
    for word, following in zip(words, [*words[1:], "="], strict=False):
        if "=" not in word:
            value = "VALUE" if "=" in following else following
            raise click.UsageError(
                f"{word} is neither a YAML file nor an override; write {word}={value}"
            )


def local_path(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Check an option that names a file or folder to write on this machine.

    pathlib would turn a store's URL into a folder `s3:`.
    """
    if value is not None and "://" in value:
        raise click.BadParameter(f"{value!r} is a URL; name a path of this machine.")
    return value


def token_count(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | None:
    """Parse an option's number of tokens, such as 2M or 64Ki."""
    from .config import count

    if value is None:
        return None
    try:
        tokens = int(value) if value.replace("_", "").isdecimal() else count(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None
    if tokens < 1 or tokens != int(tokens):
        raise click.BadParameter(f"{value!r} is not a number of tokens.")
    return int(tokens)


def named_numbers(
    words: Sequence[str], option: str, form: str, maximum: float = math.inf
) -> dict[str, float]:
    """Parse an option's words NAME=NUMBER; numbers lie between 0 and `maximum`.

    The error for a wrong word says that it is not `form`.
    """
    numbers: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not (name and 0 <= number <= maximum):
            raise click.UsageError(f"{option} {word}: not {form}")
        numbers[name] = number
    return numbers


def positive_option(name: str, default: int, help: str) -> Callable[[Any], Any]:
    """Add an option that takes a positive integer."""
    return click.option(name, default=default, show_default=True, type=click.IntRange(1), help=help)


def name_check(
    names: Callable[[], Collection[str]],
) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """Return an option's callback that accepts a table's names, and None.

    The table is imported when a name is checked: `--help` stays fast.
    """

    def check(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None and value not in (known := names()):
            raise click.BadParameter(f"{value!r} is not one of {', '.join(map(repr, known))}.")
        return value

    return check


def emit(value: object) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, default=str))


def say(text: str) -> None:
    """Print a line for the user on stderr."""
    click.echo(text, err=True)


def say_error(error: UserError | str) -> None:
    """Print an error on stderr: in colours on a terminal, unless NO_COLOR is set."""
    text, marker, hint = str(error).partition(HINT)
    label = click.style("error:", fg="red", bold=True)
    line = f"{label} {text}{click.style(marker, fg='cyan')}{hint}"
    click.echo(line, err=True, color=log.can_colour(sys.stderr))


class Command(click.Command):
    """A command whose overrides set keys: for `--KEY` it suggests the override.

    `keys` returns the dotted paths that overrides may set.
    """

    def __init__(
        self, *args: Any, keys: Callable[[], Iterable[str]] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.keys = keys

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if self.keys is None:
                raise
            paths = _keys_named(error.option_name.lstrip("-").replace("-", "_"), self.keys())
            if not paths:
                raise
            message = f"No such option: {error.option_name}. Did you mean the key {paths[0]}=VALUE?"
            raise click.UsageError(message, ctx=ctx) from None


def _keys_named(name: str, paths: Iterable[str]) -> list[str]:
    """Return the paths whose last key has this name or the most similar one, shortest first."""
    from .explain import nearest

    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    near = name if name in by_name else nearest(name, by_name)
    return sorted(by_name[near], key=lambda path: path.count(".")) if near else []


class LazyCommand(click.Command):
    """Name and summary of a command, whose module is imported at the call.

    `target` is `..folder.module:attribute`, seen from this folder.
    """

    def __init__(self, name: str, target: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self.target = target

    def load(self) -> click.Command:
        module, _, attribute = self.target.partition(":")
        command: click.Command = getattr(import_module(module, __package__), attribute)
        return command


class CommandGroup(click.Group):
    """A command with subcommands, listed as defined; prints errors and sets exit codes."""

    command_class = Command

    def main(self, *args: Any, **options: Any) -> Any:
        if f"_{str(self.name).upper()}_COMPLETE" in os.environ:  # a shell asks for completions
            _complete_paths()
        try:
            return super().main(*args, **options)
        except OSError as error:  # click itself handles a closed pipe
            if not _raised_by_echo(error):
                raise
            say_error(f"cannot write to stdout: {error.strerror}")
            # Drop the rest of the output: Python would try to write it again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)

    def add_lazy(self, *commands: LazyCommand) -> None:
        for command in commands:
            self.add_command(command)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        command = self.commands.get(name)
        return command.load() if isinstance(command, LazyCommand) else command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing their modules."""
        names = self.list_commands(ctx)
        width = formatter.width - 6 - max(map(len, names), default=0)
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self.commands[name].get_short_help_str(width)) for name in names]
            )

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
            _check_directory()
            return super().invoke(ctx)
        except UserError as error:
            if debug:
                raise
            say_error(error)
            ctx.exit(error.exit_code)
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if debug or package not in TRAINING:
                raise
            say_error(
                MissingError(
                    f"this needs the package {package}", hint="pip install 'headrace[train]'"
                )
            )
            ctx.exit(1)
        except OSError as error:
            if debug or error.filename is None or error.errno not in FILE_FAULTS:
                raise
            reason, hint = file_fault(error)
            say_error(UserError(f"cannot use {error.filename}: {reason}", hint=hint))
            ctx.exit(1)
        except KeyboardInterrupt:
            say("interrupted")
            ctx.exit(INTERRUPTED)


def _complete_paths() -> None:
    """Let shells complete paths where a command has no word to offer."""
    from click.shell_completion import (
        BashComplete,
        CompletionItem,
        FishComplete,
        ShellComplete,
        ZshComplete,
        add_completion_class,
    )

    class WordsOrPaths(ShellComplete):
        def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
            words = super().get_completions(args, incomplete)
            return words or [CompletionItem(incomplete, type="file")]

    for kind in (BashComplete, ZshComplete, FishComplete):
        add_completion_class(type(kind.__name__, (WordsOrPaths, kind), {}))


def _check_directory() -> None:
    """Raise if the current directory was deleted.

    Relative paths would fail, and so would packages that ask for it at import.
    """
    try:
        os.getcwd()  # noqa: PTH109 (Path.cwd() would import pathlib)
    except FileNotFoundError:
        raise StorageError(
            "the directory that this command was started in was deleted",
            hint="change to a directory that exists, and run the command again",
        ) from None


def _raised_by_echo(error: OSError) -> bool:
    """True if click raised the error while printing."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return innermost.f_code is click.echo.__code__


def group(
    name: str, cls: type[CommandGroup] = CommandGroup
) -> Callable[[Callable[[], None]], CommandGroup]:
    """Make a function the root command of a program; its docstring is the help text."""

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
