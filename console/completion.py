"""`headrace completion`: completion of commands, options and paths in the shell."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from . import command

PROGRAMS = ("headrace", "tokenize", "mixtures", "trainer")
SHELLS = ("bash", "zsh", "fish")
MARK = "# completion of headrace"
ANY_BYTES = "surrogateescape"
"""Error handler for a person's startup file: it may hold bytes that are not UTF-8."""
PREAMBLES = {"zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }\n"}
"""Commands that a shell needs before its script."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.option("--install", is_flag=True, help="Write the script to a file that new shells load.")
def main(shell: str, install: bool) -> None:
    """Print the script that completes commands, options and paths in a shell.

    With --install, the script is written below your home folder, and one line of the shell's own
    startup file loads it. A second --install changes nothing.

    \b
    Examples:
      headrace completion bash --install
      headrace completion zsh

    More: docs/first-hour.md
    """
    script = build_script(shell)
    if not install:
        click.echo(script, nl=False)
        return
    for path in install_script(shell, script):
        command.say(f"wrote {path}")
    command.say("open a new shell to use it")


def build_script(shell: str) -> str:
    """Return the completion script for all programs."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, shell
    program = click.Command("headrace")  # unused: the script names programs, without options
    scripts = [kind(program, {}, name, f"_{name.upper()}_COMPLETE").source() for name in PROGRAMS]
    return PREAMBLES.get(shell, "") + "\n".join(scripts)


def install_script(shell: str, script: str) -> list[Path]:
    """Write the script, and the line that loads it. Return the changed files."""
    home = Path.home()
    if shell == "fish":
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "conf.d"
        return _write(folder / "headrace.fish", script)
    folder = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "headrace"
    file = folder / f"completion.{shell}"
    rc = home / ".bashrc" if shell == "bash" else Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
    line = f"source {shlex.quote(str(file))}  {MARK}\n"
    before = rc.read_text(errors=ANY_BYTES) if rc.exists() else ""
    end = "" if not before or before.endswith("\n") else "\n"
    after = before if line in before else f"{before}{end}{line}"
    return [*_write(file, script), *_write(rc, after)]


def _write(path: Path, text: str) -> list[Path]:
    """Write the file, unless it holds this text already. Return the files that changed."""
    if path.exists() and path.read_text(errors=ANY_BYTES) == text:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, errors=ANY_BYTES)
    return [path]
