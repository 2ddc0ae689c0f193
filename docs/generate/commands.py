"""The reference of the commands, made from click's: one page for each program."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from headrace.console.headrace import main as umbrella

from .markdown import code, definitions, escaped, link_pages

PROGRAMS = ("tokenize", "mixtures", "trainer")
"""Groups of the umbrella command that are programs of their own."""


def command_pages() -> dict[str, str]:
    """Return a page for each program; that of `headrace` has the commands of no other program."""
    pages = {}
    context = click.Context(umbrella, info_name="headrace")
    for name in PROGRAMS:
        group = umbrella.get_command(context, name)
        assert group is not None
        pages[f"reference/{name}.md"] = _page(name, walk(group, name))
    umbrella_pages = [
        page
        for page in walk(umbrella, "headrace")
        if not page[0].split()[1:2] or page[0].split()[1] not in PROGRAMS
    ]
    pages["reference/headrace.md"] = _page("headrace", iter(umbrella_pages))
    return pages


def walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and those below it, with their full names."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from walk(below, f"{path} {name}")


def _page(program: str, commands: Iterator[tuple[str, click.Command]]) -> str:
    sections = [_section(path, command) for path, command in commands]
    return "\n\n".join([f"# The command {program}", *sections]) + "\n"


def _section(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    records = (parameter.get_help_record(context) for parameter in command.get_params(context))
    options = [
        (code(names), escaped(text))
        for names, text in filter(None, records)
        if text or names.startswith("-")  # the usage shows arguments
    ]
    return "\n\n".join(
        [f"## {path}", f"```text\n{usage}\n```", _help(command.help or ""), definitions(options)]
    )


def _help(text: str) -> str:
    """Return a help text as Markdown: a block marked with `\\b` keeps its lines."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(_paragraph(paragraph) for paragraph in paragraphs)


def _paragraph(text: str) -> str:
    if not text.startswith("\b"):
        return link_pages(escaped(" ".join(text.split())))
    title, _, lines = text.removeprefix("\b").strip("\n").partition("\n")
    if title.endswith(":") and lines:
        return f"{escaped(title)}\n\n```sh\n{inspect.cleandoc(lines)}\n```"
    return f"```text\n{title}\n{lines}\n```"
