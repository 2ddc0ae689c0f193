"""Markdown of docstrings and definition lists."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable


def escaped(text: str) -> str:
    """Return a docstring in which `<` begins no HTML; code between backticks stays as it is."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece if piece.startswith("`") else piece.replace("<", "&lt;").replace("*", r"\*")
        for piece in pieces
    )


def definitions(items: Iterable[tuple[str, str]]) -> str:
    """Return a definition list of (term, Markdown)."""
    return "\n\n".join(
        f"{term}\n:   {textwrap.indent(text, '    ').lstrip() or '–'}" for term, text in items
    )


def code(text: str) -> str:
    """Return a code span, of text that may have backticks itself."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def link_pages(text: str) -> str:
    """Turn the names of pages (docs/trainer.md) into links from the folder reference/."""
    text = re.sub(r"\bdocs/([\w-]+)\.md\b", r"[\1](../\1.md)", text)
    return re.sub(r"\bREADME\.md\b", "[the front page](../index.md)", text)
