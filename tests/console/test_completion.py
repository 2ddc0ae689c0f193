"""Completion in the shell, by a real bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.console.completion import PROGRAMS, SHELLS, main


def completed(home: Path, *words: str) -> list[str]:
    """Return how a new interactive bash completes the last word."""
    code = (
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        f'_{words[0]}_completion {words[0]}; echo "${{COMPREPLY[@]}}"'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "--rcfile", str(home / ".bashrc"), "-i", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(home), "PATH": path},
    )
    return run.stdout.split()


def test_bash_completes_after_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    (tmp_path / ".bashrc").write_text("alias x=y")
    for _ in range(2):  # a second installation changes nothing
        assert CliRunner().invoke(main, ["bash", "--install"]).exit_code == 0
    lines = (tmp_path / ".bashrc").read_text().splitlines()
    assert [lines[0], len(lines)] == ["alias x=y", 2]
    assert completed(tmp_path, "trainer", "rep") == ["report"]
    assert set(completed(tmp_path, "tokenize", "in")) == {"index", "inspect"}
    assert completed(tmp_path, "headrace", "tokenize", "verify", "--js") == ["--json"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("trainer", "resume", "ru"), "file,ru"),
        (("headrace", "tokenize", "verify", "da"), "file,da"),
        (("trainer", "rep"), "plain,report"),
    ],
)
def test_paths_are_offered_where_a_command_has_no_words(
    words: tuple[str, ...], offered: str
) -> None:
    environment = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    program = Path(sys.executable).with_name(words[0])
    asked = {f"_{words[0].upper()}_COMPLETE": "bash_complete"}
    run = subprocess.run(
        [program], capture_output=True, text=True, env={**os.environ, **environment, **asked}
    )
    assert run.stdout.split() == [offered]


def test_odd_homes_and_startup_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / 'a "home" of $x'
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    (home / ".bashrc").write_bytes(b"# caf\xe9\n")
    assert CliRunner().invoke(main, ["bash", "--install"]).exit_code == 0
    assert (home / ".bashrc").read_bytes().startswith(b"# caf\xe9\n")
    assert completed(home, "trainer", "rep") == ["report"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_program(shell: str) -> None:
    text = CliRunner().invoke(main, [shell]).stdout
    for program in PROGRAMS:
        assert f"_{program.upper()}_COMPLETE={shell}_complete" in text


def test_fish_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert CliRunner().invoke(main, ["fish", "--install"]).exit_code == 0
    assert (tmp_path / "config" / "fish" / "conf.d" / "headrace.fish").exists()
