"""Show a step's rows on the page: documents, text, and the proof against the ledger."""

from __future__ import annotations

import threading
from typing import Any

from ...console.errors import UserError
from ...dataplane.runlog import decisions, document_losses
from ...dataplane.storage import storage
from ...mixtures.audit.audit_rows import AuditedRow
from ...mixtures.audit.auditor import Auditor
from ...mixtures.audit.recorded_losses import find_recorded, list_shares
from ...mixtures.planning.open_plan import open_plan
from .runs import BoardRun

PAGE_ROWS = 8
"""Rows on a page."""
MAX_SHARES = 50
"""Maximum number of documents listed with their losses."""
MAX_REMOTE_BYTES = 64 << 20
"""Maximum size of a remote record of losses: a store is read whole, at each click."""
MAX_CHARACTERS = 20_000
"""Maximum number of characters shown from a document's piece."""


class StepRows:
    """Audits runs' steps, and caches the last plan and the last step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: tuple[tuple[str, str, int], Auditor] | None = None
        self._audited: tuple[tuple[str, int], list[AuditedRow], bool] | None = None

    def page(self, run: BoardRun, step: int, first: int) -> dict[str, Any]:
        """Return the step's rows from number `first` (0 is the step's first row), and its metrics
        line with the line before."""
        entry = run.metrics.entry(step)
        metrics: dict[str, Any] = {"run": run.id, "step": step, "metrics": None, "before": None}
        if entry is not None:
            metrics["metrics"] = run.metrics.line(entry)
            metrics["before"] = run.metrics.line(entry - 1) if entry else None
        if run.plan is None and run.problem:
            return {**metrics, "error": run.problem, "hint": None}
        if run.plan is None:
            return {**metrics, "why": "The rows of this run are synthetic: there are no documents."}
        with self._lock:
            try:
                auditor = self._auditor(run)
                rows, proved = self._audit_step(run, auditor, step)
                page_rows = [_row(auditor, row) for row in rows[first : first + PAGE_ROWS]]
            except UserError as error:
                return {**metrics, "error": error.message, "hint": error.hint}
        counts: dict[str, int] = {}
        for row in rows:
            counts[row.source] = counts.get(row.source, 0) + 1
        return {
            **metrics,
            "proved": proved,
            "taken": auditor.opened.ledger is not None and entry is not None,
            "count": len(rows),
            "counts": counts,
            "first": first,
            "page": PAGE_ROWS,
            "rows": page_rows,
            **_shares(run, rows, step),
        }

    def _auditor(self, run: BoardRun) -> Auditor:
        assert run.plan is not None
        file = storage.join(run.url, decisions.NAME)  # it grows while the run goes on
        size = storage.size(file) if storage.exists(file) else 0
        key = (run.url, str(run.plan["hash"]), size)
        if self._opened is None or self._opened[0] != key:
            self._audited = None
            self._opened = (key, Auditor(open_plan(run.url)))
        return self._opened[1]

    def _audit_step(
        self, run: BoardRun, auditor: Auditor, step: int
    ) -> tuple[list[AuditedRow], bool]:
        """Return the step's rows, and whether the ledger proves them. An unproved step is audited
        again: the ledger may have reached it since."""
        key = (run.url, step)
        if self._audited is None or self._audited[0] != key or not self._audited[2]:
            auditor.opened.__dict__.pop("ledger", None)  # a cached property
            self._audited = (key, *auditor.step(step))
        return self._audited[1], self._audited[2]


def _shares(run: BoardRun, rows: list[AuditedRow], step: int) -> dict[str, Any]:
    """List the documents with recorded losses, the largest share of the step's loss first, or name
    the problem. `page` is the number of the first row on the page with the document."""
    file = storage.join(run.url, document_losses.NAME)
    try:
        is_remote = not storage.is_local(file) and storage.exists(file)
        if is_remote and storage.size(file) > MAX_REMOTE_BYTES:
            problem = f"{file} is too large to be read for a step"
            return {"documents": [], "documents_problem": problem}
        recorded = find_recorded(run.url, step)
    except UserError as error:
        return {"documents": [], "documents_problem": error.message}
    numbers = {row.row: number for number, row in enumerate(rows)}
    shares = [] if recorded is None else list_shares(rows, recorded)[:MAX_SHARES]
    return {
        "documents": [
            {**share.json_data(), "page": numbers[share.rows[0]] // PAGE_ROWS * PAGE_ROWS}
            for share in shares
        ],
        "documents_problem": None,
    }


def _row(auditor: Auditor, row: AuditedRow) -> dict[str, Any]:
    pieces = zip(row.documents, auditor.texts(row.row), strict=True)
    return {
        "row": row.row,
        "phase": row.phase,
        "source": row.source,
        "epoch": row.epoch,
        "hash": row.tokens_hash,
        "documents": [
            {**vars(piece), "text": text[:MAX_CHARACTERS], "cut": len(text) > MAX_CHARACTERS}
            for piece, text in pieces
        ],
    }
