"""Ranked documents as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...dataplane.shards.documents import format_place

Entry = Mapping[str, Any]


def format_documents(documents: Sequence[Entry]) -> str:
    lines = [f"{'loss':>8} {'source':>8} {'tokens':>9} {'step':>9}  document"]
    for entry in documents:
        times = f", in {entry['steps']:,} steps" if entry["steps"] > 1 else ""
        applied = "" if entry["applied"] else "; the weights do not hold this step"
        lines.append(
            f"{_loss(entry['loss']):>8} {_loss(entry['source_loss']):>8} {entry['tokens']:>9,.0f} "
            f"{entry['step']:>9,}  {_name(entry)}{times}{applied}"
        )
    return "\n".join(lines)


def format_groups(groups: Sequence[Entry], key: str) -> str:
    width = max(len(key), *(len(entry["group"]) for entry in groups))
    lines = [f"{key:<{width}} {'documents':>9} {'above':>8}  worst document"]
    for entry in groups:
        lines.append(
            f"{entry['group']:<{width}} {entry['documents']:>9,} {_loss(entry['excess']):>8}  "
            f"{_name(entry['worst'])}"
        )
    return "\n".join(lines)


def _name(entry: Entry) -> str:
    row = f"row {entry['row']:,} from token {entry['first']:,}"
    if entry["document"] is None:
        return f"{entry['source']}, {row}"
    identity = f" ({entry['id']})" if entry["id"] is not None else ""
    place = format_place(entry["file"], entry["position"])
    return f"{entry['source']}, document {entry['document']:,}{identity}, {place}, {row}"


def _loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"
