"""A page of questions with answers; an empty answer says what would fill it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...console.page import table

EMPTY = "Not stated"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a question."""

    question: str
    text: str = ""
    fill: str = ""
    """The missing fact that would answer it; empty if it is answered."""
    head: tuple[str, ...] = ()
    """Names of columns, if the answer is a table."""
    rows: tuple[tuple[str, ...], ...] = ()

    def json_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"question": self.question, "answer": self.text or None}
        if self.fill:
            data["missing"] = self.fill
        if self.rows:
            data["table"] = [dict(zip(self.head, row, strict=True)) for row in self.rows]
        return data


@dataclass(frozen=True, kw_only=True)
class Section:
    """A numbered section with its answers."""

    number: str
    title: str
    answers: tuple[Answer, ...] = ()

    def json_data(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "title": self.title,
            "answers": [answer.json_data() for answer in self.answers],
        }

    def render(self) -> list[str]:
        """Render a table of questions and answers, then the answers that are tables."""
        lines = [f"{'#' * (self.number.count('.') + 2)} {self.number} {self.title}", ""]
        short = [
            (answer.question, answer.text or f"{EMPTY}: {answer.fill}")
            for answer in self.answers
            if not answer.rows
        ]
        lines += [*table(("", ""), short), ""] if short else []
        for answer in self.answers:
            if answer.rows:
                lines += [f"{answer.question}: {answer.text}".rstrip(": ") + ":", ""]
                lines += [*table(answer.head, answer.rows), ""]
        return lines


def say(question: str, text: str, fill: str) -> Answer:
    """Answer with a text; `fill` says what would answer if the text is empty."""
    return Answer(question=question, text=text, fill="" if text else fill)


def count_missing(sections: Sequence[Section]) -> int:
    return sum(bool(answer.fill) for section in sections for answer in section.answers)
