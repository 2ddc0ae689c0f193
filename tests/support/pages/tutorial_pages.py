"""The blocks of a tutorial: commands (```sh), and parts of their output after them (```text)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import yaml

from headrace.console import config
from headrace.console.errors import UserError
from headrace.console.headrace import main
from headrace.mixtures.mixture_file.mixture import Mixture
from headrace.models.config.config import ModelConfig
from headrace.trainer.guide.config_key import find_meanings
from headrace.trainer.run.config import load as load_run

TUTORIALS = sorted((Path(__file__).parents[3] / "docs" / "tutorials").glob("*.md"))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^cat > (\S+) <<'(\w+)'\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
INPUT = re.compile(r"<<'(\w+)'\n.*?^\1$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\w.,:+-]*")
"""Numbers with their units, hashes and times."""
TRAINS = re.compile(r"\btrainer run ")
REDIRECTION = re.compile(r"\d?>+&? ?[\w./-]+")
COMMENT = re.compile(r"(?<!\S)#.*$", re.MULTILINE)
"""shlex would take the end of the line with it."""
PROGRAMS = ("trainer", "mixtures", "tokenize")


@dataclass
class Block:
    commands: str
    shown: str = ""


class Page:
    BORDER = "\n--- next block ---\n"

    def __init__(self, text: str) -> None:
        self.blocks: list[Block] = []
        for kind, lines in BLOCK.findall(text):
            assert kind in ("sh", "text"), f"a block of {kind} is neither run nor compared"
            assert lines.strip(), "an empty block"
            if kind == "sh":
                self.blocks.append(Block(lines))
            else:
                self.blocks[-1].shown += lines

    def script(self) -> str:
        """Return the commands as a script that ends at the first error."""
        return self._script(block.commands for block in self.blocks)

    def rehearsal(self) -> str:
        """Return the script up to the block that trains first, which trains with `--dry-run`."""
        trains = [
            number for number, block in enumerate(self.blocks) if TRAINS.search(block.commands)
        ]
        *before, last = [block.commands for block in self.blocks[: trains[0] + 1]]
        return self._script([*before, TRAINS.sub("trainer run --dry-run ", last)])

    def _script(self, blocks: Iterable[str]) -> str:
        border = "echo " + shlex.quote(self.BORDER.removesuffix("\n"))
        return "exec 2>&1\nset -eu -o pipefail\n" + "\n".join(f"{border}\n{b}" for b in blocks)


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the shown lines that were not printed. Numbers may differ; … is any text."""
    lines = [_plain(line) for line in printed.splitlines()]
    missing = []
    for line in shown.splitlines():
        parts = [re.escape(part.strip()) for part in _plain(line).split("…")]
        expected = re.compile(".*".join(parts))
        if not any(expected.search(line) for line in lines):
            missing.append(line)
    return missing


def _plain(line: str) -> str:
    return re.sub(r"\s+", " ", NUMBER.sub("0", line))


def problems(page: Page, folder: Path) -> list[str]:
    """Return the commands and YAML files of a page that headrace does not understand."""
    result = []
    for block in page.blocks:
        for name, _, text in FILE.findall(block.commands):
            if name.endswith(".yaml"):
                result += _wrong_file(text, folder / Path(name).name)
        for words in commands(INPUT.sub("", block.commands)):
            result += _wrong_command(words)
    return result


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each command of headrace in a script."""
    script = COMMENT.sub("", REDIRECTION.sub(" ", script.replace("\\\n", " ")))
    lexer = shlex.shlex(script, posix=True, punctuation_chars=";|&()\n")
    lexer.whitespace, lexer.whitespace_split = " \t", True
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if not set(word) <= set(";|&()\n"):
            words.append(word)
            continue
        while words and (words[0] in ("do", "then", "if", "!") or words[0].endswith("=$")):
            del words[0]
        if words and words[0] in (*PROGRAMS, "headrace"):
            yield words[words[0] == "headrace" :]
        words = []


def _wrong_file(text: str, file: Path) -> list[str]:
    file.write_text(text)
    keys = yaml.safe_load(text)
    if "task" in keys:  # a file of lm-evaluation-harness
        return []
    try:
        if "phases" in keys:
            config.load(Mixture, file)
        elif "pattern" in keys:
            config.load(ModelConfig, file)
        else:
            load_run(str(file), [])
    except UserError as error:
        return [f"{file.name}: {error}"]
    return []


def _wrong_command(words: list[str]) -> list[str]:
    """Let click parse a command, and look up the keys of its overrides."""
    command: click.Command = main
    context, rest = click.Context(main, info_name="headrace"), words
    try:
        while isinstance(command, click.Group) and rest:
            name, result, rest = command.resolve_command(context, rest)
            assert result is not None
            command, context = result, click.Context(result, parent=context, info_name=name)
            rest = command.parse_args(context, list(rest))
            rest = [*context._protected_args, *rest]
    except click.UsageError as error:
        if "does not exist" in error.message:  # a folder that an earlier block makes
            return []
        return [f"{shlex.join(words)}: {error.format_message()}"]
    arguments = [param.name for param in command.params if isinstance(param, click.Argument)]
    values = " ".join(str(context.params.get(str(name))) for name in arguments)
    keys = re.findall(r"'([a-z_]+(?:\.\w+)*)=", values)
    prefix = "mixture." if words[0] == "mixtures" else ""
    return [f"{shlex.join(words)}: no key {key}" for key in keys if not find_meanings(prefix + key)]
