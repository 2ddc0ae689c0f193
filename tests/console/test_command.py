"""The conventions of every command: where output goes, exit codes, and `--debug` anywhere."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from headrace.console import command

PROGRAM = '''
import sys
import click
from headrace.console import command
from headrace.console.errors import MisuseError, StorageError

@command.group("tool")
def main():
    """A tool for tests."""

@main.command()
@command.overrides_argument
@command.json_option
def show(overrides, as_json):
    """Show the overrides."""
    if as_json:
        command.emit({"overrides": list(overrides)})
    else:
        command.say("to people")
        click.echo("to programs")

@main.command()
def fail():
    """Fail as a user's mistake fails."""
    raise StorageError("the disk is full", hint="free some space")

@main.command()
def misuse():
    """Fail as what contradicts its inputs fails."""
    raise MisuseError("these are no letters")

@main.command()
def bug():
    """Fail as a mistake of ours fails."""
    raise AssertionError("ours")

@main.command()
def stop():
    """Be interrupted."""
    raise KeyboardInterrupt

@main.command()
def flood():
    """Print more than a pipe holds."""
    for number in range(200_000):
        click.echo(number)

main()
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tool") / "tool.py"
    file.write_text(PROGRAM)
    return file


def run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, program, *words], capture_output=True, text=True)


def test_help_lists_the_subcommands_as_they_are_written(program: Path) -> None:
    result = run(program, "--help")
    assert result.returncode == 0
    assert result.stderr == ""
    words = [line.split()[0] for line in result.stdout.split("Commands:")[1].split("\n") if line]
    assert words == ["show", "fail", "misuse", "bug", "stop", "flood"]


def test_people_and_programs_are_told_apart(program: Path) -> None:
    result = run(program, "show")
    assert (result.returncode, result.stdout, result.stderr) == (0, "to programs\n", "to people\n")


def test_json_is_one_document_on_stdout(program: Path) -> None:
    result = run(program, "show", "a.b=1", "c=2", "--json")
    assert json.loads(result.stdout) == {"overrides": ["a.b=1", "c=2"]}


def test_a_users_mistake_has_no_traceback(program: Path) -> None:
    result = run(program, "fail")
    assert result.returncode == 1
    assert result.stderr == "error: the disk is full\n  hint:  free some space\n"
    assert result.stdout == ""


def test_what_contradicts_its_inputs_is_misuse_too(program: Path) -> None:
    result = run(program, "misuse")
    assert (result.returncode, result.stderr) == (2, "error: these are no letters\n")


@pytest.mark.parametrize("words", [("fail", "--debug"), ("--debug", "fail")])
def test_debug_shows_the_traceback_wherever_it_stands(
    program: Path, words: tuple[str, ...]
) -> None:
    result = run(program, *words)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "StorageError: the disk is full" in result.stderr


def test_what_follows_two_dashes_is_no_option(program: Path) -> None:
    result = run(program, "show", "--json", "--", "--debug")
    assert json.loads(result.stdout) == {"overrides": ["--debug"]}


def test_a_mistake_of_ours_is_not_hidden(program: Path) -> None:
    result = run(program, "bug")
    assert result.returncode == 1
    assert "AssertionError: ours" in result.stderr


@pytest.mark.parametrize("words", [("shwo",), ("show", "--jsn"), ("--nothing",)])
def test_misuse_exits_with_two(program: Path, words: tuple[str, ...]) -> None:
    result = run(program, *words)
    assert result.returncode == 2
    assert "Usage: tool" in result.stderr


def test_an_interruption_is_told_in_a_word(program: Path) -> None:
    result = run(program, "stop")
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


def test_a_reader_that_goes_away_is_no_traceback(program: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, program, "flood"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=30) == 1


@pytest.mark.parametrize("words", [("show",), ("show", "--json"), ("flood",), ("--help",)])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_told_in_a_line(program: Path, words: tuple[str, ...]) -> None:
    command = [sys.executable, str(program), *words]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr.removeprefix("to people\n") == (
        "error: cannot write to stdout: No space left on device\n"
    )


def test_the_version_is_that_of_the_package(program: Path) -> None:
    from headrace import __version__

    assert run(program, "--version").stdout == f"tool, version {__version__}\n"


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    @command.group("painted")
    def painted() -> None:
        """Colours."""

    @painted.command()
    def show() -> None:
        click.echo(click.style("red", fg="red"))

    def said() -> str:
        return CliRunner().invoke(painted, ["show"], color=True).stdout

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert said() == "\x1b[31mred\x1b[0m\n"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert said() == "red\n"
