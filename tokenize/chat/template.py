"""Chat templates: Jinja in a sandbox, with `transformers`' settings and functions.

A template must always render a conversation to the same text, so the clock and random choices are
refused. Marks in the rendered text show `{% generation %}` blocks, and special tokens' names inside
a message; conversation.py reads both.
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
"""A `{% generation %}` block's beginning and end; a mark inside a name that is plain text; a mark
where a record and the template could compose a name. Unicode reserves these characters for internal
use, so no text should contain them."""
MARKS = OPEN + CLOSE + BREAK + EDGE


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`: what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 (as in jinja2)
    used = False

    def parse(self, parser: Parser) -> nodes.Node:
        self.used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_wrap_in_marks"), [], [], body).set_lineno(line)

    def _wrap_in_marks(self, caller: Any) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template."""

    jinja: jinja2.Template
    marks_generation: bool
    """The template has `{% generation %}` blocks."""
    variables: frozenset[str]
    """Names that the template reads and does not set."""
    texts: tuple[str, ...]
    """Strings that the template writes or compares with."""
    compared: frozenset[str]
    """Strings that the template compares with, such as roles."""

    def render(self, messages: list[Any], variables: Mapping[str, Any], *, prompt: bool) -> str:
        """Render messages; raise ChatProblem. With `prompt`, the beginning of the assistant's next
        turn follows."""
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
def compile_template(source: str, name: str) -> ChatTemplate:
    """Compile a template; raise InputError with the template's name and the line."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
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
    generation = environment.extensions[GenerationBlock.identifier]
    assert isinstance(generation, GenerationBlock)
    template_texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    constants = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    comparisons = (node.find_all(nodes.Const) for node in tree.find_all(nodes.Compare))
    return ChatTemplate(
        jinja,
        generation.used,
        frozenset(meta.find_undeclared_variables(tree)),
        (*template_texts, *constants),
        frozenset(
            node.value
            for operands in comparisons
            for node in operands
            if isinstance(node.value, str)
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
