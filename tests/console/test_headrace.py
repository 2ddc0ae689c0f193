"""`headrace`: the umbrella command imports each subcommand only when it is used."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from headrace.console.commands import HEADRACE, TRAINER, lazy
from headrace.console.headrace import main

ROOT = Path(__file__).parents[2]
DESCRIBED = (
    "tokenize",
    "mixtures",
    "trainer",
    "models",
    "doctor",
    "config",
    "recipes",
    "completion",
    "demo",
)
"""Subcommands whose help texts have examples and name a page."""


@pytest.mark.parametrize("name", HEADRACE)
def test_every_subcommand_has_help(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: headrace {name}")


@pytest.mark.parametrize("name", ["tokenize", "mixtures", "trainer", "models"])
def test_each_folder_has_a_command_of_its_own(name: str) -> None:
    module = HEADRACE[name][0].removesuffix(":main").replace("..", "headrace.")
    result = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True
    )
    assert result.returncode == 0
    assert result.stdout.startswith(f"{name}, version ")


def test_help_lists_subcommands_without_importing_them() -> None:
    code = (
        "import sys; from click.testing import CliRunner\n"
        "from headrace.console.headrace import main\n"
        "result = CliRunner().invoke(main, ['--help']); assert result.exit_code == 0\n"
        "print(result.output)\n"
        "imported = [name for name in sys.modules if name.startswith('headrace.')]\n"
        "assert all(name.startswith('headrace.console') for name in imported), imported\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name, (_, text) in HEADRACE.items():
        assert f"  {name} " in result.stdout
        assert text in result.stdout


def test_an_unknown_subcommand_is_misuse() -> None:
    result = CliRunner().invoke(main, ["nothing"])
    assert result.exit_code == 2
    assert "No such command 'nothing'" in result.output


def help_pages(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the words of a command and of all its subcommands."""
    yield words
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                subcommand = command.get_command(context, name)
                assert subcommand is not None
                yield from help_pages(subcommand, (*words, name))


def described_commands() -> list[tuple[str, ...]]:
    groups = {name: main.get_command(click.Context(main), name) for name in DESCRIBED}
    return [(), *(page for name, group in groups.items() for page in help_pages(group, (name,)))]


@pytest.mark.parametrize("name", TRAINER)
def test_summaries_of_subcommands_above_the_trainer_are_their_own(name: str) -> None:
    (command,) = lazy(TRAINER, name)
    assert command.help == command.load().get_short_help_str(200)


@pytest.mark.parametrize("words", described_commands(), ids=" ".join)
def test_help_has_examples_that_parse_and_names_a_page(words: tuple[str, ...]) -> None:
    text = CliRunner().invoke(main, [*words, "--help"]).stdout
    _, title, rest = text.partition("Example")
    assert title, text
    examples, more, rest = rest.partition("More: ")
    assert more, text
    page = re.split("[;, \n]", rest)[0]
    assert (ROOT / page).is_file(), page
    examples = examples.replace("\\\n", "")  # a line that goes on
    lines = [shlex.split(line) for line in examples.splitlines()[1:] if line.strip()]
    assert lines
    for line in lines:
        arguments = line[1:] if line[0] == "headrace" else line
        command: click.Command = main
        while isinstance(command, click.Group) and not (
            command.invoke_without_command and arguments[0].startswith("-")
        ):
            with click.Context(command) as context:
                subcommand = command.get_command(context, arguments[0])
            assert subcommand is not None, line
            command, arguments = subcommand, arguments[1:]
        command.make_context(line[0], arguments)  # raises UsageError if the example is wrong
