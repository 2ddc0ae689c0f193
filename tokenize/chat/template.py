"""Chat templates: Jinja in a sandbox, with the settings and functions that `transformers` gives.

A template must render a conversation alike each time, so the clock and random choices are refused.
Marks in the rendered text show what a template says about it: `{% generation %}` blocks, and names
of special tokens that are part of a message (conversation.py reads both).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...console.errors import InputError
from .problems import FAILED, REFUSED, UNSTEADY, ChatProblem

OPEN, CLOSE, BREAK, EDGE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
"""Begin and end of a `{% generation %}` block; a mark within a name that is plain text; a mark
where a name could be put together from a record and the template. Unicode keeps these characters
for such uses: no text should hold them."""
MARKS = OPEN + CLOSE + BREAK + EDGE


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 (as in jinja2)
    used = False

    def parse(self, parser: Parser) -> nodes.Node:
        self.used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


@dataclass(frozen=True)
class Template:
    """A compiled template."""

    jinja: jinja2.Template
    marks_generation: bool
    """It has `{% generation %}` blocks."""
    variables: frozenset[str]
    """Names that it reads and does not set."""
    texts: tuple[str, ...]
    """The texts that it writes or compares with."""
    compared: frozenset[str]
    """The texts that it compares with, such as roles."""

    def render(self, messages: list[Any], variables: Mapping[str, Any], *, prompt: bool) -> str:
        """Render messages; raise ChatProblem. With `prompt`, the beginning of an answer of the
        assistant follows."""
        try:
            return self.jinja.render(
                {"tools": None, "documents": None, **variables},
                messages=messages,
                add_generation_prompt=prompt,
            )
        except ChatProblem:
            raise
        except Exception as error:  # templates run code of others
            raise ChatProblem(FAILED, f"{type(error).__name__}: {error}") from None


@lru_cache(maxsize=4)
def compiled(source: str, name: str) -> Template:
    """Compile a template; raise InputError, which names the template and the line."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    del environment.filters["random"]
    del environment.globals["lipsum"]  # random words
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _clock
    if any(mark in source for mark in MARKS):
        raise InputError(
            f"the chat template {name} holds a character from U+FDD0 to U+FDD3",
            hint="remove it: Unicode keeps these characters for internal uses, as here",
        )
    try:
        jinja = environment.from_string(source)
        tree = environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(
            f"the chat template {name} is wrong in line {error.lineno}: {error.message}",
            hint="correct the template: it is read as transformers reads it",
        ) from None
    generation = environment.extensions[Generation.identifier]
    assert isinstance(generation, Generation)
    written = [node.data for node in tree.find_all(nodes.TemplateData)]
    named = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    compared = (node.find_all(nodes.Const) for node in tree.find_all(nodes.Compare))
    return Template(
        jinja,
        generation.used,
        frozenset(meta.find_undeclared_variables(tree)),
        (*written, *named),
        frozenset(
            node.value for found in compared for node in found if isinstance(node.value, str)
        ),
    )


def _refuse(message: str) -> None:
    raise ChatProblem(REFUSED, str(message))


def _clock(format: str) -> None:
    raise ChatProblem(
        UNSTEADY,
        f"it reads the clock (strftime_now({format!r})), so every build would differ; give the "
        "variable that holds the date, as in --chat-set date_string='26 Jul 2024'",
    )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
