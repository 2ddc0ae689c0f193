"""Page of several runs, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from ...console.progress import as_bytes, human
from ..board.runs import settings_of
from ..drawing.page import legend, page, section
from . import charts
from .data import RunData, first_difference
from .page import NATS, held_out


def comparison_page(runs: Sequence[RunData], unit: str | None, note: str | None) -> str:
    """Return the page. `unit` is that of all losses, None if they cannot be compared; `note` says
    why the unit is not nats per token."""
    names = [run.name for run in runs]
    difference = charts.difference(runs) if unit else None
    body = [
        f'<header><div><p class="over">headrace · comparison</p>'
        f"<h1>{escape(' · '.join(names))}</h1></div></header>",
        f'<p class="note">{escape(note)}</p>' if note else "",
        section(
            "Loss",
            charts.compared(runs, "loss", 330, "loss"),
            legend=legend(names),
            unit=unit or f"{NATS}, of different tokenizers",
        ),
        section(f"Loss minus the loss of {escape(names[0])}", difference, unit=unit or "")
        if difference
        else "",
        held_out(runs, unit or f"{NATS}, of different tokenizers"),
        _losses_by_source(runs, unit or f"{NATS}, of different tokenizers"),
        section(
            "Gradient norm",
            charts.compared(runs, "grad_norm", 160, "gradient norm"),
            unit="before clipping",
        ),
        section("Learning rate", charts.compared(runs, "lr", 160, "learning rate")),
        _comparison(runs),
        _settings(runs),
    ]
    return page(" · ".join(names), "".join(body))


def _losses_by_source(runs: Sequence[RunData], unit: str) -> str:
    """Return a chart for each source that several runs have."""
    counts = Counter(name for run in runs for name in run.sources)
    shared = [name for name, count in counts.items() if count > 1]
    if len(counts) == 1:
        return ""
    charts_of = (
        section(f"Loss of {escape(name)}", charts.compared_source(runs, name), unit=unit)
        for name in shared
    )
    return f'<div class="pair">{"".join(charts_of)}</div>'


def _comparison(runs: Sequence[RunData]) -> str:
    values: dict[str, list[str]] = {
        "status": [run.status for run in runs],
        "tokens": [human(run.tokens) for run in runs],
        "loss": [f"{run.loss:.4f}" if run.loss is not None else "not finite" for run in runs],
        "tokens per second": [human(run.tokens_per_second) for run in runs],
        "held-out loss": [f"{run.held_out:.4f}" if run.held_out else "–" for run in runs],
        "skipped steps": [str(len(run.skipped)) for run in runs],
        "data wait": [f"{run.data_wait:.2%}" for run in runs],
        "memory": [as_bytes(run.memory) if run.memory else "–" for run in runs],
        "restarts": [str(len(run.restarts)) for run in runs],
        "parameters": [human(run.about["model"]["parameters"]) for run in runs],
        "model": [run.job.model.pattern for run in runs],
        "engine": [run.about["layout"]["engine"] for run in runs],
        "peak learning rate": [f"{run.job.run.optimizer.lr:g}" for run in runs],
        "phases": [_phases(run) for run in runs],
        "plan": [run.job.plan.hash for run in runs],
        "ledger": [run.ledger for run in runs],
        f"rows compared with {runs[0].name}": [
            "",
            *(_row_difference(runs[0], run) for run in runs[1:]),
        ],
    }
    return section("Side by side", _sides(runs, values))


def _settings(runs: Sequence[RunData]) -> str:
    """Return the table of the settings that differ between the runs."""
    settings = [settings_of(str(run.job.folder.root)) for run in runs]
    keys = dict.fromkeys(key for found in settings for key in found)
    values = {key: [_shown(found.get(key)) for found in settings] for key in keys}
    differing = {key: cells for key, cells in values.items() if len(set(cells)) > 1}
    return section("Settings that differ", _sides(runs, differing)) if differing else ""


def _shown(value: object) -> str:
    return "–" if value is None else str(value)


def _sides(runs: Sequence[RunData], values: Mapping[str, Sequence[str]]) -> str:
    """Return a table with a column for each run; rows that differ are bold."""
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = "".join(
        f'<tr class="{"differs" if len(set(cells)) > 1 else ""}"><th>{escape(name)}</th>'
        + "".join(f"<td>{escape(value)}</td>" for value in cells)
        + "</tr>"
        for name, cells in values.items()
    )
    return (
        f'<div class="scroll"><table class="sides"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _phases(run: RunData) -> str:
    return ", ".join(f"{phase.name} {human(phase.tokens)}" for phase in run.job.plan.phases)


def _row_difference(first: RunData, run: RunData) -> str:
    step = first_difference(first, run)
    if step is None:
        return "the same"
    plans = first.job.plan.hash != run.job.plan.hash
    return f"differ from step {step:,} on" + (", by another plan" if plans else "")
