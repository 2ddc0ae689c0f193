"""Datasets of a run: their documents, the fields that they keep, and the views among them.

Only datasets of this machine are read: the page of a run must not wait for a store.
"""

from __future__ import annotations

from html import escape

from ...console.errors import UserError
from ...console.progress import human
from ...dataplane.datasets import manifest
from ...dataplane.datasets.view import view_of
from ...dataplane.order.plan import Plan, PlanSource
from ...dataplane.storage import storage

HEADS = ("source", "dataset", "documents", "tokens", "fields", "view")


def table(plan: Plan) -> str:
    """Return the table of the datasets; empty if none of them can be read here."""
    rows = [_cells(source) for source in plan.sources]
    if all(cells is None for cells in rows):
        return ""
    lines = []
    for source, cells in zip(plan.sources, rows, strict=True):
        known = cells or ["–"] * (len(HEADS) - 2)
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in [source.url, *known])
        lines.append(f"<tr><th>{escape(source.name)}</th>{shown}</tr>")
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    return (
        f'<div class="scroll"><table class="history"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cells(source: PlanSource) -> list[str] | None:
    """Return documents, tokens, fields and view of a source; None if its dataset is not here."""
    if not storage.is_local(source.url):
        return None
    try:
        held = manifest.load(source.url)
    except UserError:
        return None
    planned = held.generations[: source.generations]
    if len(planned) < source.generations or planned[-1].hash != source.dataset:
        return None
    fields = (f"{name} ({kind})" for name, kind in held.kept_fields.items())
    view = view_of(source.url, held)
    return [
        f"{sum(made.documents for made in planned):,}",
        human(sum(made.tokens for made in planned)),
        ", ".join(fields) or "–",
        f"{view.url} {view.text}" if view else "–",
    ]
