"""`headrace`: one name for every room, each imported when it is asked for."""

import subprocess
import sys
from importlib import import_module

import click
import pytest
from click.testing import CliRunner

from headrace.console.headrace import ROOMS, main


@pytest.mark.parametrize("name", ROOMS)
def test_every_room_is_there(name: str) -> None:
    module = import_module(ROOMS[name][0], "headrace.console")
    assert isinstance(module.main, click.Command)
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: headrace {name}")


@pytest.mark.parametrize("name", ["tokenize", "mixtures", "trainer", "models"])
def test_a_room_is_its_own_command_as_well(name: str) -> None:
    module = ROOMS[name][0].replace("..", "headrace.")
    result = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True
    )
    assert result.returncode == 0
    assert result.stdout.startswith(f"{name}, version ")


def test_help_lists_the_rooms_without_entering_them() -> None:
    code = (
        "import sys; from click.testing import CliRunner\n"
        "from headrace.console.headrace import main\n"
        "result = CliRunner().invoke(main, ['--help']); assert result.exit_code == 0\n"
        "print(result.output)\n"
        "entered = [name for name in sys.modules if name.startswith('headrace.')]\n"
        "assert all(name.startswith('headrace.console') for name in entered), entered\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name, (_, text) in ROOMS.items():
        assert f"  {name} " in result.stdout
        assert text in result.stdout


def test_a_name_that_is_not_there_is_misuse() -> None:
    result = CliRunner().invoke(main, ["nothing"])
    assert result.exit_code == 2
    assert "No such command 'nothing'" in result.output
