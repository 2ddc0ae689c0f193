"""Render a run's datasets: documents, stored fields and views.

Only local datasets are read: a run's page must not wait for a store.
"""

from __future__ import annotations

from html import escape

from ...console.errors import UserError
from ...console.progress import format_number
from ...dataplane.datasets import manifest
from ...dataplane.datasets.view import parse_view
from ...dataplane.order.plan import Plan, PlanSource
from ...dataplane.storage import storage

HEADINGS = ("source", "dataset", "documents", "tokens", "fields", "view")


def table(plan: Plan) -> str:
    """Render the dataset table; empty if no dataset can be read on this machine."""
    rows = [_cells(source) for source in plan.sources]
    if all(cells is None for cells in rows):
        return ""
    lines = []
    for source, cells in zip(plan.sources, rows, strict=True):
        columns = [source.url, *(cells or ["–"] * (len(HEADINGS) - 2))]
        row = "".join(f"<td>{escape(cell)}</td>" for cell in columns)
        lines.append(f"<tr><th>{escape(source.name)}</th>{row}</tr>")
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    return (
        f'<div class="scroll"><table class="history"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cells(source: PlanSource) -> list[str] | None:
    """Return a source's documents, tokens, fields and view; None if the dataset that the plan names
    is not on this machine."""
    if not storage.is_local(source.url):
        return None
    try:
        dataset = manifest.load(source.url)
    except UserError:
        return None
    planned = dataset.generations[: source.generations]
    if len(planned) < source.generations or planned[-1].hash != source.dataset:
        return None
    fields = (f"{name} ({kind})" for name, kind in dataset.kept_fields.items())
    view = parse_view(source.url, dataset)
    return [
        f"{sum(generation.documents for generation in planned):,}",
        format_number(sum(generation.tokens for generation in planned)),
        ", ".join(fields) or "–",
        f"{view.url} {view.text}" if view else "–",
    ]
