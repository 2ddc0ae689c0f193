"""Conventions of all commands: output streams, exit codes, `--debug`, help texts."""

import json
import os
import pty
import re
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
        command.say("for users")
        click.echo("for programs")

@main.command()
def fail():
    """Fail with a user error."""
    raise StorageError("the disk is full", hint="free some space")

@main.command()
def misuse():
    """Fail with a misuse error."""
    raise MisuseError("these are not letters")

@main.command()
def bug():
    """Fail with a bug."""
    raise AssertionError("a bug")

@main.command()
def stop():
    """Behave as if interrupted."""
    raise KeyboardInterrupt

@main.command()
def disk():
    """Meet an error of the file system that nothing has handled."""
    raise OSError(30, "Read-only file system", "/archive/runs")

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


def test_help_lists_subcommands_in_order_of_definition(program: Path) -> None:
    result = run(program, "--help")
    assert result.returncode == 0
    assert result.stderr == ""
    words = [line.split()[0] for line in result.stdout.split("Commands:")[1].split("\n") if line]
    assert words == ["show", "fail", "misuse", "bug", "stop", "disk", "flood"]


def test_results_go_to_stdout_and_messages_to_stderr(program: Path) -> None:
    result = run(program, "show")
    assert (result.returncode, result.stdout, result.stderr) == (0, "for programs\n", "for users\n")


def test_json_is_one_document_on_stdout(program: Path) -> None:
    result = run(program, "show", "a.b=1", "c=2", "--json")
    assert json.loads(result.stdout) == {"overrides": ["a.b=1", "c=2"]}


def test_a_user_error_has_no_traceback(program: Path) -> None:
    result = run(program, "fail")
    assert result.returncode == 1
    assert result.stderr == "error: the disk is full\n  hint:  free some space\n"
    assert result.stdout == ""


def test_a_misuse_error_exits_with_2(program: Path) -> None:
    result = run(program, "misuse")
    assert (result.returncode, result.stderr) == (2, "error: these are not letters\n")


@pytest.mark.parametrize("words", [("fail", "--debug"), ("--debug", "fail")])
def test_debug_shows_the_traceback_at_any_position(program: Path, words: tuple[str, ...]) -> None:
    result = run(program, *words)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "StorageError: the disk is full" in result.stderr


def test_words_after_two_dashes_are_not_options(program: Path) -> None:
    result = run(program, "show", "--json", "--", "--debug")
    assert result.returncode == 2
    assert "--debug is neither a YAML file nor an override; write --debug=VALUE" in result.stderr


def test_a_bug_shows_its_traceback(program: Path) -> None:
    result = run(program, "bug")
    assert result.returncode == 1
    assert "AssertionError: a bug" in result.stderr


@pytest.mark.parametrize("words", [("shwo",), ("show", "--jsn"), ("--nothing",)])
def test_unknown_options_exit_with_2(program: Path, words: tuple[str, ...]) -> None:
    result = run(program, *words)
    assert result.returncode == 2
    assert "Usage: tool" in result.stderr


def test_a_file_system_that_refuses_is_one_error_with_a_hint(program: Path) -> None:
    result = run(program, "disk")
    assert (result.returncode, result.stderr) == (
        1,
        "error: cannot use /archive/runs: the file system is read-only\n"
        "  hint:  choose a folder that can be written to\n",
    )
    assert "Traceback" in run(program, "disk", "--debug").stderr


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_an_error_on_a_terminal_is_coloured(
    program: Path, variables: dict[str, str], coloured: bool
) -> None:
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment = {**kept, "TERM": "xterm", **variables}
    subprocess.run([sys.executable, program, "fail"], stderr=theirs, env=environment)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        shown = terminal.read(4096).decode().replace("\r\n", "\n")
    plain = "error: the disk is full\n  hint:  free some space\n"
    assert re.sub(r"\x1b\[\d+m", "", shown) == plain
    assert (shown != plain) == coloured


def test_an_interruption_prints_one_word(program: Path) -> None:
    result = run(program, "stop")
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


def test_a_closed_pipe_gives_no_traceback(program: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, program, "flood"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=300) == 1


@pytest.mark.parametrize("words", [("show",), ("show", "--json"), ("flood",), ("--help",)])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_error_line(program: Path, words: tuple[str, ...]) -> None:
    command = [sys.executable, str(program), *words]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr.removeprefix("for users\n") == (
        "error: cannot write to stdout: No space left on device\n"
    )


def test_version_is_the_version_of_the_package(program: Path) -> None:
    from headrace import __version__

    assert run(program, "--version").stdout == f"tool, version {__version__}\n"


def test_colours_respect_no_color_and_dumb_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    @command.group("painted")
    def painted() -> None:
        """Colours."""

    @painted.command()
    def show() -> None:
        click.echo(click.style("red", fg="red"))

    def output() -> str:
        return CliRunner().invoke(painted, ["show"], color=True).stdout

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output() == "\x1b[31mred\x1b[0m\n"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert output() == "red\n"


@pytest.mark.parametrize("words", ["tokenize inspect x", "mixtures plan x", "trainer report x"])
def test_a_deleted_directory_is_named(words: str, tmp_path: Path) -> None:
    """The shell stands in a directory that is deleted; help needs none."""
    gone = tmp_path / "gone"
    gone.mkdir()
    module = f"{sys.executable} -c 'from headrace.console.headrace import main; main()'"
    for line, code in ((words, 1), ("--help", 0)):
        script = f"rmdir {gone}; {module} {line}"
        gone.mkdir(exist_ok=True)
        run = subprocess.run(["sh", "-c", script], cwd=gone, capture_output=True, text=True)
        assert run.returncode == code, run.stderr
        if code:
            assert run.stderr == (
                "error: the directory that this command was started in was deleted\n"
                "  hint:  change to a directory that exists, and run the command again\n"
            )


@pytest.mark.parametrize(
    "words",
    [
        "trainer run --out s3://bucket/x synthetic.steps=1",
        "trainer report run --out s3://bucket/x.html",
        "trainer tune plan.yaml --out s3://bucket/x",
        "trainer anneal run --mixtures m.yaml --out s3://bucket/x",
        "trainer export run s3://bucket/x",
        "models convert folder s3://bucket/x",
        "recipes hybrid-1b --out s3://bucket/x",
        "demo --out s3://bucket/x",
    ],
)
def test_a_folder_of_this_machine_is_no_url(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pathlib would make a folder `s3:`, which no one looks for."""
    from headrace.console.headrace import main as headrace

    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(headrace, words.split())
    assert refused.exit_code == 2 and "name a path of this machine" in refused.output
    assert not list(tmp_path.iterdir())
