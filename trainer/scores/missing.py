"""Scores that a run was to have and has not: not computed yet, or failed.

A task that failed is an answer too: it is recorded with its reason in `scores.jsonl`, and tried
again on request alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ...console.errors import UserError

FAILED = "failed"
"""Key of an entry: the reason of each task that failed."""
ASKED = "asked"
"""Key of an entry: the tasks, groups and tags that were asked for."""


@dataclass(frozen=True)
class Missing:
    """Tasks without scores at a step, and why."""

    step: int
    tasks: tuple[str, ...]
    reason: str | None = None
    """Why the tasks failed; None if they were not computed."""

    def sentence(self) -> str:
        tasks = ", ".join(self.tasks)
        if self.reason is None:
            return f"step {self.step:,} has no scores of {tasks} yet"
        return f"the scores of {tasks} at step {self.step:,} failed: {self.reason.rstrip('.')}"

    def command(self, run: str) -> str:
        """Return the command that computes them, with the settings of the run."""
        return f"trainer eval {shlex.quote(run)} --step {self.step}"


def reason(error: UserError) -> str:
    """Return what failed as one line."""
    return " ".join(error.what.split())


def failed(tasks: Sequence[str], error: UserError) -> dict[str, Any]:
    """Return the entry of scores.jsonl for tasks that one error keeps from being scored."""
    return {ASKED: list(tasks), FAILED: dict.fromkeys(tasks, reason(error)), "tasks": {}}


def unanswered(
    tasks: Iterable[str], entries: Iterable[Mapping[str, Any]], step: int
) -> tuple[str, ...]:
    """Return the tasks that were neither scored nor failed at a step."""
    answered: set[str] = set()
    for entry in entries:
        if entry["step"] == step:
            answered |= {*entry.get(ASKED, ()), *entry["tasks"]}
    return tuple(task for task in tasks if task not in answered)


def failures(entries: Iterable[Mapping[str, Any]]) -> list[Missing]:
    """Return the tasks that failed and were not scored at that step by another evaluation; those
    of one step with one reason together."""
    reasons: dict[tuple[int, str], str] = {}
    scored: set[tuple[int, str]] = set()
    for entry in entries:
        step, failed = int(entry["step"]), entry.get(FAILED, {})
        reasons |= {(step, task): reason for task, reason in failed.items()}
        scored |= {(step, task) for task in {*entry.get(ASKED, ()), *entry["tasks"]} - {*failed}}
    alike: dict[tuple[int, str], list[str]] = {}
    for (step, task), reason in sorted(reasons.items()):
        if (step, task) not in scored:
            alike.setdefault((step, reason), []).append(task)
    return [Missing(step, tuple(names), reason) for (step, reason), names in alike.items()]


def missing(
    tasks: Sequence[str] | None, entries: Sequence[Mapping[str, Any]], last: int | None
) -> list[Missing]:
    """Return all that is missing of a run that scores these tasks, if any; `last` is its last step
    if the checkpoint of that step is saved, and must then have scores."""
    owed = unanswered(tasks, entries, last) if tasks and last is not None else ()
    return [*([Missing(last, owed)] if owed and last is not None else []), *failures(entries)]


def note(missing: Sequence[Missing], run: str) -> str:
    """Return a line of HTML for each part that is missing, with the command that computes it."""
    return "".join(
        f'<p class="note"><b>Missing scores.</b> {escape(_sentence(each))} '
        f"To compute them: "
        f"<code>{escape(each.command(run))}</code></p>"
        for each in missing
    )


def _sentence(each: Missing) -> str:
    text = each.sentence()
    return text[0].upper() + text[1:] + "."
