"""Find scores that a run should have: not computed yet, or failed.

A failed task is an answer too: `scores.jsonl` records its reason, and only a person's command tries
it again.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ...console.errors import UserError

FAILED = "failed"
"""Key of an entry: reasons by failed task."""
ASKED = "asked"
"""Key of an entry: the requested tasks, groups and tags."""
INCLUDE_PATH = "include_path"
"""Key of an entry: the folder with more tasks, or None."""


@dataclass(frozen=True)
class ScoreGap:
    """Tasks without scores at a step, and why."""

    step: int
    tasks: tuple[str, ...]
    reason: str | None = None
    """Why the tasks failed; None if they were not computed."""
    options: tuple[str, ...] = ()
    """Options that name the tasks, where the run's settings do not."""

    def sentence(self) -> str:
        tasks = ", ".join(self.tasks)
        if self.reason is None:
            return f"step {self.step:,} has no scores of {tasks} yet"
        return f"the scores of {tasks} at step {self.step:,} failed: {self.reason.rstrip('.')}"

    def command(self, run: str) -> str:
        """Return the command that computes the scores."""
        return shlex.join(["trainer", "eval", run, "--step", str(self.step), *self.options])


def failure_reason(error: UserError) -> str:
    """Return the error's message on one line."""
    return " ".join(error.message.split())


def failure_entry(tasks: Sequence[str], error: UserError) -> dict[str, Any]:
    """Return the entry of scores.jsonl for tasks that all fail with one error."""
    return {ASKED: list(tasks), FAILED: dict.fromkeys(tasks, failure_reason(error)), "tasks": {}}


def unanswered_tasks(
    tasks: Iterable[str],
    entries: Iterable[Mapping[str, Any]],
    step: int,
    *,
    limit: int | None = None,
    ema: bool | None = False,
) -> tuple[str, ...]:
    """Return the tasks that neither succeeded nor failed at a step. Scores of fewer documents than
    `limit` allows, or of other weights, come from a person's quick check and do not count."""
    answered: set[str] = set()
    for entry in entries:
        comparable = entry.get("limit") in (None, limit) and bool(entry.get("ema", ema)) == bool(
            ema
        )
        if entry["step"] == step and comparable:
            answered |= {*entry[ASKED], *entry["tasks"]}
    return tuple(task for task in tasks if task not in answered)


def find_failures(
    entries: Iterable[Mapping[str, Any]], run_tasks: Collection[str] = ()
) -> list[ScoreGap]:
    """Find tasks that failed at a step and that no evaluation scored there. Tasks with the same
    step and reason form one gap. `run_tasks` are the tasks in the run's settings."""
    reasons: dict[tuple[int, str], tuple[str, str | None]] = {}
    scored: set[tuple[int, str]] = set()
    for entry in entries:
        step, failed = int(entry["step"]), entry[FAILED]
        folder = entry.get(INCLUDE_PATH)
        reasons |= {
            (step, task): (reason, None if task in run_tasks else folder)
            for task, reason in failed.items()
        }
        scored |= {(step, task) for task in {*entry[ASKED], *entry["tasks"]} - {*failed}}
    groups: dict[tuple[int, str, bool, str | None], list[str]] = {}
    for (step, task), (reason, folder) in reasons.items():
        if (step, task) not in scored:
            groups.setdefault((step, reason, task in run_tasks, folder), []).append(task)
    gaps = [
        ScoreGap(step, tuple(tasks), reason, () if in_settings else _task_options(tasks, folder))
        for (step, reason, in_settings, folder), tasks in groups.items()
    ]
    return sorted(gaps, key=lambda gap: (gap.step, gap.tasks))


def _task_options(tasks: Sequence[str], folder: str | None) -> tuple[str, ...]:
    return ("--tasks", ",".join(tasks), *(("--include-path", folder) if folder else ()))


def find_gaps(
    tasks: Sequence[str] | None,
    entries: Sequence[Mapping[str, Any]],
    last_step: int | None,
    *,
    limit: int | None = None,
    ema: bool | None = False,
) -> list[ScoreGap]:
    """Find the missing scores of a run that scores `tasks`. `last_step` is given if its checkpoint
    is saved, and then must have scores."""
    failures = find_failures(entries, tasks or ())
    if tasks and last_step is not None:
        unanswered = unanswered_tasks(tasks, entries, last_step, limit=limit, ema=ema)
        if unanswered:
            return [ScoreGap(last_step, unanswered), *failures]
    return failures


def render_gaps(gaps: Sequence[ScoreGap], run: str) -> str:
    """Render an HTML line for each gap, with the command that closes it."""
    return "".join(
        f'<p class="note"><b>Missing scores.</b> {escape(_capitalized_sentence(gap))} '
        f"To compute them: "
        f"<code>{escape(gap.command(run))}</code></p>"
        for gap in gaps
    )


def _capitalized_sentence(gap: ScoreGap) -> str:
    sentence = gap.sentence()
    return sentence[0].upper() + sentence[1:] + "."
