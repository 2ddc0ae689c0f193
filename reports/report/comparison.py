"""Render a page that compares several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ...console.html.page import comparison_table, page, section
from ...console.progress import format_bytes, format_number
from ..scores.tables import compare_scores
from . import view
from .losses import losses_section
from .reading.data import RunData, first_difference
from .reading.loss_unit import LossUnit


def comparison_page(runs: Sequence[RunData], unit: LossUnit) -> str:
    names = [run.name for run in runs]
    data, script = view.embed_curves(runs, unit.shown, compared=unit.name is not None)
    body = [
        f'<header><div><p class="over">headrace · comparison</p>'
        f"<h1>{escape(' · '.join(names))}</h1></div></header>",
        f'<p class="note">{escape(unit.note)}</p>' if unit.note else "",
        view.CONTROLS,
        view.WIDE,
        losses_section(runs),
        compare_scores({run.name: (run.scores, run.recall) for run in runs}),
        _figures(runs),
        _settings(runs),
        view.MORE,
        data,
    ]
    return page(" · ".join(names), "".join(body), script=script, style=view.style())


def _figures(runs: Sequence[RunData]) -> str:
    values: dict[str, list[str]] = {
        "status": [run.status for run in runs],
        "tokens": [format_number(run.tokens) for run in runs],
        "loss": [f"{run.loss:.4f}" if run.loss is not None else "not finite" for run in runs],
        "tokens per second": [format_number(run.totals.tokens_per_second) for run in runs],
        "bits per byte": [_number(run.bits) for run in runs],
        "held-out loss": [_number(run.held_out) for run in runs],
        "held-out bits per byte": [_number(run.held_out_bits) for run in runs],
        "skipped steps": [str(len(run.skipped)) for run in runs],
        "data wait": [f"{run.totals.data_wait:.2%}" for run in runs],
        "memory": [format_bytes(run.memory) if run.memory else "–" for run in runs],
        "restarts": [str(len(run.restarts)) for run in runs],
        "parameters": [format_number(run.about["model"]["parameters"]) for run in runs],
        "model": [run.about["model"]["pattern"] for run in runs],
        "engine": [run.about["layout"]["engine"] for run in runs],
        "peak learning rate": [f"{run.about['lr']:g}" for run in runs],
        "phases": [_phases(run) for run in runs],
        "plan": [run.plan.hash for run in runs],
        "ledger": [run.ledger for run in runs],
        f"rows compared with {runs[0].name}": [
            "",
            *(_row_difference(runs[0], run) for run in runs[1:]),
        ],
    }
    return section("Side by side", _sides(runs, values))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _settings(runs: Sequence[RunData]) -> str:
    """Render the settings that differ between the runs; empty if they are equal."""
    settings_by_run = [run.stored.settings for run in runs]
    keys = dict.fromkeys(key for settings in settings_by_run for key in settings)
    values = {key: [_setting(settings.get(key)) for settings in settings_by_run] for key in keys}
    differing = {key: cells for key, cells in values.items() if len(set(cells)) > 1}
    return section("Settings that differ", _sides(runs, differing)) if differing else ""


def _setting(value: object) -> str:
    return "–" if value is None else str(value)


def _sides(runs: Sequence[RunData], values: Mapping[str, Sequence[str]]) -> str:
    rows = (
        (len(set(cells)) > 1, [*map(escape, (heading, *cells))])
        for heading, cells in values.items()
    )
    return comparison_table(["", *(escape(run.name) for run in runs)], rows)


def _phases(run: RunData) -> str:
    return ", ".join(f"{phase.name} {format_number(phase.tokens)}" for phase in run.plan.phases)


def _row_difference(first: RunData, run: RunData) -> str:
    step = first_difference(first, run)
    if step is None:
        return "the same"
    plans_differ = first.plan.hash != run.plan.hash
    return f"differ from step {step:,} on" + (", by another plan" if plans_differ else "")
