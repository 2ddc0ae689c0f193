"""Rows of a step for the page: documents, text, and the proof against the ledger."""

from __future__ import annotations

import threading
from typing import Any

from ...console.errors import UserError
from ...mixtures.audit.audit_rows import AuditedRow
from ...mixtures.audit.auditor import Auditor
from ...mixtures.planning.open_plan import open_plan
from .runs import BoardRun

PAGE = 8
"""Rows that are shown at once."""
MOST_TEXT = 20_000
"""Characters of a document's piece that are shown."""


class StepRows:
    """The rows of the steps of runs. The last step and the last plan are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: tuple[tuple[str, str], Auditor] | None = None
        self._audited: tuple[tuple[str, int], list[AuditedRow], bool] | None = None

    def page(self, run: BoardRun, step: int, first: int) -> dict[str, Any]:
        """Return a page of a step's rows, from its row number `first` on (0: the step's first), and
        the line of metrics beside the line before it."""
        entry = run.metrics.entry(step)
        found: dict[str, Any] = {"run": run.id, "step": step, "metrics": None, "before": None}
        if entry is not None:
            found["metrics"] = run.metrics.line(entry)
            found["before"] = run.metrics.line(entry - 1) if entry else None
        if run.plan is None and run.problem:
            return {**found, "error": run.problem, "hint": None}
        if run.plan is None:
            return {**found, "why": "The rows of this run are synthetic: there are no documents."}
        with self._lock:
            try:
                auditor = self._auditor(run)
                rows, proved = self._step(run, auditor, step)
                shown = [_shown(auditor, row) for row in rows[first : first + PAGE]]
            except UserError as error:
                return {**found, "error": error.what, "hint": error.hint}
        counts: dict[str, int] = {}
        for row in rows:
            counts[row.source] = counts.get(row.source, 0) + 1
        return {
            **found,
            "proved": proved,
            "taken": auditor.opened.ledger is not None and entry is not None,
            "count": len(rows),
            "counts": counts,
            "first": first,
            "page": PAGE,
            "rows": shown,
        }

    def _auditor(self, run: BoardRun) -> Auditor:
        assert run.plan is not None
        key = (run.url, str(run.plan["hash"]))
        if self._opened is None or self._opened[0] != key:
            self._audited = None
            self._opened = (key, Auditor(open_plan(run.url)))
        return self._opened[1]

    def _step(self, run: BoardRun, auditor: Auditor, step: int) -> tuple[list[AuditedRow], bool]:
        key = (run.url, step)
        if self._audited is None or self._audited[0] != key or not self._audited[2]:
            auditor.opened.__dict__.pop("ledger", None)  # it may have begun since
            self._audited = (key, *auditor.step(step))
        return self._audited[1], self._audited[2]


def _shown(auditor: Auditor, row: AuditedRow) -> dict[str, Any]:
    pieces = zip(row.documents, auditor.texts(row.row), strict=True)
    return {
        "row": row.row,
        "phase": row.phase,
        "source": row.source,
        "epoch": row.epoch,
        "hash": row.tokens_hash,
        "documents": [
            {**vars(piece), "text": text[:MOST_TEXT], "cut": len(text) > MOST_TEXT}
            for piece, text in pieces
        ],
    }
