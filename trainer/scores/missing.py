"""Scores that a run was to have and has not: not computed yet, or failed.

A task that failed is an answer too: it is recorded with its reason in `scores.jsonl`, and tried
again on request alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ...console.errors import UserError

FAILED = "failed"
"""Key of an entry: the reason of each task that failed."""
ASKED = "asked"
"""Key of an entry: the tasks, groups and tags that were asked for."""
INCLUDE_PATH = "include_path"
"""Key of an entry: the folder of more tasks, if there was one."""


@dataclass(frozen=True)
class Missing:
    """Tasks without scores at a step, and why."""

    step: int
    tasks: tuple[str, ...]
    reason: str | None = None
    """Why the tasks failed; None if they were not computed."""
    words: tuple[str, ...] = ()
    """Options that name the tasks, where the run's own settings do not."""

    def sentence(self) -> str:
        tasks = ", ".join(self.tasks)
        if self.reason is None:
            return f"step {self.step:,} has no scores of {tasks} yet"
        return f"the scores of {tasks} at step {self.step:,} failed: {self.reason.rstrip('.')}"

    def command(self, run: str) -> str:
        """Return the command that computes them."""
        return shlex.join(["trainer", "eval", run, "--step", str(self.step), *self.words])


def reason(error: UserError) -> str:
    """Return what failed as one line."""
    return " ".join(error.message.split())


def failed(tasks: Sequence[str], error: UserError) -> dict[str, Any]:
    """Return the entry of scores.jsonl for tasks that one error keeps from being scored."""
    return {ASKED: list(tasks), FAILED: dict.fromkeys(tasks, reason(error)), "tasks": {}}


def unanswered(
    tasks: Iterable[str],
    entries: Iterable[Mapping[str, Any]],
    step: int,
    *,
    limit: int | None = None,
    ema: bool | None = False,
) -> tuple[str, ...]:
    """Return the tasks that were neither scored nor failed at a step. Scores of fewer documents
    than `limit` allows, or of other weights, are those of a person's quick look."""
    answered: set[str] = set()
    for entry in entries:
        alike = entry.get("limit") in (None, limit) and bool(entry.get("ema", ema)) == bool(ema)
        if entry["step"] == step and alike:
            answered |= {*entry[ASKED], *entry["tasks"]}
    return tuple(task for task in tasks if task not in answered)


def failures(entries: Iterable[Mapping[str, Any]], own: Collection[str] = ()) -> list[Missing]:
    """Return the tasks that failed and were not scored at that step by another evaluation; those
    of one step with one reason together. `own` are the tasks of the run's settings."""
    reasons: dict[tuple[int, str], tuple[str, str | None]] = {}
    scored: set[tuple[int, str]] = set()
    for entry in entries:
        step, failed = int(entry["step"]), entry[FAILED]
        folder = entry.get(INCLUDE_PATH)
        reasons |= {
            (step, task): (reason, None if task in own else folder)
            for task, reason in failed.items()
        }
        scored |= {(step, task) for task in {*entry[ASKED], *entry["tasks"]} - {*failed}}
    alike: dict[tuple[int, str, bool, str | None], list[str]] = {}
    for (step, task), (reason, folder) in reasons.items():
        if (step, task) not in scored:
            alike.setdefault((step, reason, task in own, folder), []).append(task)
    found = [
        Missing(step, tuple(names), reason, () if known else _words(names, folder))
        for (step, reason, known, folder), names in alike.items()
    ]
    return sorted(found, key=lambda each: (each.step, each.tasks))


def _words(tasks: Sequence[str], folder: str | None) -> tuple[str, ...]:
    return ("--tasks", ",".join(tasks), *(("--include-path", folder) if folder else ()))


def missing(
    tasks: Sequence[str] | None,
    entries: Sequence[Mapping[str, Any]],
    last: int | None,
    *,
    limit: int | None = None,
    ema: bool | None = False,
) -> list[Missing]:
    """Return all that is missing of a run that scores these tasks, if any; `last` is its last step
    if the checkpoint of that step is saved, and must then have scores."""
    owed: tuple[str, ...] = ()
    if tasks and last is not None:
        owed = unanswered(tasks, entries, last, limit=limit, ema=ema)
    return [
        *([Missing(last, owed)] if owed and last is not None else []),
        *failures(entries, tasks or ()),
    ]


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
