"""Render a run's measured seconds and bytes beside its layout plan's predictions."""

from __future__ import annotations

from html import escape
from typing import Any

from ...console.html.page import scrolling_table
from ...console.progress import format_bytes
from ...trainer.accounting.measured import format_phases


def table(comparison: dict[str, Any]) -> tuple[str, str]:
    """Render a comparison from `trainer/accounting/measured.py`. Return the table and a caption."""
    rows = [
        _row(
            f"step of {phase['phase']}",
            f"{phase['predicted']:.4g} s",
            f"{phase['measured']:.4g} s",
            phase["ratio"],
            f"{phase['batch_tokens']:,} tokens, rows of {phase['seq_len']:,}; median of "
            f"{phase['steps']} steps",
        )
        for phase in comparison["phases"]
    ]
    memory = comparison["memory"]
    rows += [
        _row(
            f"memory of rank {rank}",
            format_bytes(memory["predicted"]),
            format_bytes(size),
            memory["predicted"] / size,
            format_phases(memory["phases"]),
        )
        for rank, size in enumerate(memory["measured"])
        if size is not None
    ]
    headings = ("", "predicted", "measured", "ratio", "")
    html = scrolling_table("".join(rows), headings, "history")
    by_cpu_time = comparison["clock"] == "cpu_seconds"
    time = "CPU time of the busiest rank" if by_cpu_time else "time of a step"
    return html, f"{time}; prediction from {escape(comparison['hardware'])}"


def _row(heading: str, predicted: str, measured: str, ratio: float, note: str) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in (predicted, measured, f"{ratio:.2f}", note))
    return f"<tr><th>{escape(heading)}</th>{cells}</tr>"
