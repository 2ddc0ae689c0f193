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
"""How a person's startup file is read and written, which may hold bytes that are not UTF-8."""
BEFORE = {"zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }\n"}
"""Commands that a shell's script needs before it."""


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
    text = script(shell)
    if not install:
        click.echo(text, nl=False)
        return
    for path in written(shell, text):
        command.say(f"wrote {path}")
    command.say("open a new shell to use it")


def script(shell: str) -> str:
    """Return the completion script of all programs."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, shell
    nothing = click.Command("headrace")  # a script names programs; it holds none of their options
    parts = [kind(nothing, {}, name, f"_{name.upper()}_COMPLETE").source() for name in PROGRAMS]
    return BEFORE.get(shell, "") + "\n".join(parts)


def written(shell: str, text: str) -> list[Path]:
    """Write the script, and the line that loads it; return the files that changed."""
    home = Path.home()
    if shell == "fish":
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "conf.d"
        return _write(folder / "headrace.fish", text)
    folder = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "headrace"
    file = folder / f"completion.{shell}"
    rc = home / ".bashrc" if shell == "bash" else Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
    line = f"source {shlex.quote(str(file))}  {MARK}\n"
    before = rc.read_text(errors=ANY_BYTES) if rc.exists() else ""
    end = "" if not before or before.endswith("\n") else "\n"
    after = before if line in before else f"{before}{end}{line}"
    return [*_write(file, text), *_write(rc, after)]


def _write(path: Path, text: str) -> list[Path]:
    """Write a file, unless it holds this text; return it if it was written."""
    if path.exists() and path.read_text(errors=ANY_BYTES) == text:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, errors=ANY_BYTES)
    return [path]
