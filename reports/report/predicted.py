"""Table of a run's measured seconds and bytes beside those that its layout plan predicts."""

from __future__ import annotations

from html import escape
from typing import Any

from ...console.progress import as_bytes
from ...trainer.accounting.measured import format_phases


def table(beside: dict[str, Any]) -> tuple[str, str]:
    """Return the table, and a note on what it compares."""
    rows = [
        _row(
            f"step of {each['phase']}",
            f"{each['predicted']:.4g} s",
            f"{each['measured']:.4g} s",
            each["ratio"],
            f"{each['batch_tokens']:,} tokens, rows of {each['seq_len']:,}; median of "
            f"{each['steps']} steps",
        )
        for each in beside["phases"]
    ]
    memory = beside["memory"]
    rows += [
        _row(
            f"memory of rank {rank}",
            as_bytes(memory["predicted"]),
            as_bytes(size),
            memory["predicted"] / size,
            format_phases(memory["phases"]),
        )
        for rank, size in enumerate(memory["measured"])
        if size is not None
    ]
    heads = "".join(f"<th>{name}</th>" for name in ("", "predicted", "measured", "ratio", ""))
    text = (
        f'<div class="scroll"><table class="history"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    time = "CPU time of the busiest rank" if beside["clock"] == "cpu_seconds" else "time of a step"
    return text, f"{time}; prediction from {escape(beside['hardware'])}"


def _row(name: str, predicted: str, measured: str, ratio: float, note: str) -> str:
    cells = "".join(f"<td>{text}</td>" for text in (predicted, measured, f"{ratio:.2f}", note))
    return f"<tr><th>{escape(name)}</th>{cells}</tr>"
