"""Render a run's page."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from ...console.html.page import (
    definitions,
    layer_stripe,
    legend,
    page,
    scrolling_table,
    section,
    tiles,
)
from ...console.progress import format_bytes, format_duration, format_number
from ...dataplane.order.plan import Plan
from ...trainer.accounting.measured import EVENT
from ...trainer.folders.folder import ATTESTED, NOT_STEERED, STEERED
from ..board.byte_sizes import NATS
from ..board.runs import SKIPPED
from ..scores.recall_chart import recall_section
from ..scores.tables import scores_section
from . import charts, predicted, signals, sources, view
from .losses import losses_section
from .outliers import OutlierStep, find_outliers
from .reading.candidates import DEVIATIONS, WINDOW
from .reading.data import RunData

MAX_RANKS = 8
"""Ranks whose memory is listed; for more ranks, the range is."""
PROFILES = "steps-*.rank-0.txt"
"""Tables of traced steps; those of other ranks stay in the folder."""
MAX_SKIPPED = 10
"""Skipped steps listed at the run's start, and as many at its end."""


def run_page(run: RunData) -> str:
    outliers = find_outliers(run)
    data, script = view.embed_curves([run], NATS, outliers)
    body = [
        _header(run),
        _failure(run),
        _ledger(run),
        _tiles(run),
        view.CONTROLS,
        view.WIDE,
        _outliers(run, outliers),
        _skipped(run),
        signals.stragglers(run),
        losses_section([run]),
        scores_section(run.scores, run.score_gaps, str(run.folder.root)),
        recall_section(run.recall),
        section(
            "Mixture",
            charts.draw_mixture(run) + _phase_table(run),
            legend=legend(run.sources, _overall(run)),
        ),
        _datasets(run),
        view.MORE,
        _predicted(run),
        _schedule(run),
        _profiles(run),
        _configuration(run),
        _history(run),
        data,
    ]
    return page(run.name, "".join(body), script=script, style=view.style())


def _failure(run: RunData) -> str:
    """Render a failed run's error, which stands first on the page."""
    return f'<section class="failure"><pre>{escape(run.error)}</pre></section>' if run.error else ""


def _ledger(run: RunData) -> str:
    """Render why the ledger does not prove the run; empty if it does."""
    if run.ledger_damage is None:
        return ""
    message = f"The ledger does not prove this run: it {run.ledger_damage}"
    return f'<section class="failure"><pre>{escape(message)}</pre></section>'


def _outliers(run: RunData, outliers: Sequence[OutlierStep]) -> str:
    """Render the outlier steps and their possible causes."""
    if not outliers:
        return ""
    rows = "".join(
        f"<tr><th>{step.step:,}</th><td>{escape(step.entry['phase'])}</td>"
        f"<td>{_beside_usual(step.entry['loss'], step.usual)}</td>"
        f"<td>{'<br>'.join(_source(*source) for source in step.risen)}</td>"
        f"<td>{_beside_usual(step.entry['grad_norm'], step.usual_norm, '.3g')}</td>"
        f"<td>{escape('; '.join(step.events))}</td></tr>"
        for step in outliers
    )
    headings = ("step", "phase", "loss", "by source", "gradient norm", "events before")
    table = scrolling_table(rows, headings, "history")
    note = (
        f"The loss of all tokens, or of one source, is above each of the {WINDOW} losses before "
        f"it, and above their median by more than {DEVIATIONS:g} deviations. Grey: the median of "
        "those steps."
    )
    if isinstance(run.plan, Plan):  # synthetic rows have no documents
        worst = max(outliers, key=lambda step: step.deviations)
        audit = f"mixtures audit {shlex.quote(str(run.folder.root))} --step {worst.step} --text"
        note += f" To see the rows of a step: <code>{escape(audit)}</code>"
    return section("Outlier steps", f'{table}<p class="note">{note}</p>')


def _source(name: str, loss: float, usual: float | None) -> str:
    value = _beside_usual(loss, usual) if usual is not None else f"{loss:.4f} <em>new</em>"
    return f"{escape(name)} {value}"


def _beside_usual(value: float | None, usual: float | None, spec: str = ".4f") -> str:
    """Format a number, and the usual one in grey."""
    number = f"{value:{spec}}" if value is not None else "not finite"
    return number if usual is None else f"{number}&nbsp;<em>{usual:{spec}}</em>"


def _skipped(run: RunData) -> str:
    """Render the first and last skipped steps, with their rows."""
    skipped = run.skipped
    if not skipped:
        return ""
    rows = [
        f"<tr><th>{event['step']:,}</th><td>{escape(event['event'])}</td>"
        f"<td>{escape(event['what'].partition(': ')[2] or event['what'])}</td>"
        f"<td>{escape(event['where'])}</td>"
        f"<td>{_consequence(event)}</td></tr>"
        for event in skipped
    ]
    if (num_hidden := len(rows) - 2 * MAX_SKIPPED) > 0:
        rows[MAX_SKIPPED:-MAX_SKIPPED] = [f'<tr><td colspan="5">… {num_hidden:,} more</td></tr>']
    table = scrolling_table("".join(rows), style="history")
    return section("Skipped steps", table, unit=f"{len(skipped):,} of {run.steps:,} steps")


def _consequence(event: dict[str, Any]) -> str:
    return f"rolled back to step {event['back_to']:,}" if "back_to" in event else "skipped"


def _header(run: RunData) -> str:
    return (
        f'<header><div><p class="over">headrace · run</p><h1>{escape(run.name)}</h1></div>'
        f'<span class="status {run.status}">{run.status}</span></header>{_stripe(run)}'
    )


def _stripe(run: RunData) -> str:
    """Render the model as a stripe with a cell for each layer."""
    model = run.about["model"]
    return layer_stripe(model["layers"], model["note"])


def _tiles(run: RunData) -> str:
    planned, totals, loss = run.plan.tokens, run.totals, run.loss
    mfu, hfu = totals.mean("mfu"), totals.mean("hfu")
    utilisation = f"MFU {mfu:.1%}" + (f", HFU {hfu:.1%}" if hfu is not None else "") if mfu else ""
    figures = [
        (
            "tokens",
            format_number(run.tokens),
            f"{_percent(run.tokens / planned)} of {format_number(planned)}",
        ),
        ("loss", f"{loss:.4f}" if loss is not None else "not finite", _loss_note(run)),
        (
            "steps",
            f"{run.steps:,}",
            f"of {run.plan.steps:,}",
        ),
        (
            "tokens per second",
            format_number(totals.tokens_per_second),
            utilisation or run.about["layout"]["device"].upper(),
        ),
        ("data wait", f"{totals.data_wait:.2%}", "of the time"),
        ("time", format_duration(totals.seconds), _restart_note(run)),
    ]
    return tiles(figures)


def _percent(progress: float) -> str:
    """Format a percentage: 100% only at the end, 0% only at the start."""
    return f"{int(100 * progress)}%" if progress >= 0.01 else f"{100 * progress:.2g}%"


def _loss_note(run: RunData) -> str:
    first, count = run.first["loss"], len(run.last)
    last = f"last {count} steps, " if count > 1 else ""
    bits = f"{run.bits:.3g} bits per byte, " if run.bits is not None else ""
    return f"{bits}{last}from {first:.3g}" if first is not None else bits.removesuffix(", ")


def _restart_note(run: RunData) -> str:
    count = len(run.restarts)
    return f"{count} restart{'s' * (count != 1)}" if count else "no restart"


def _overall(run: RunData) -> list[str]:
    """Format the tokens taken by source, and their share in all tokens."""
    phases = run.phases()
    tokens_by_source = [
        sum(phase.realised[source] for phase in phases) for source in range(len(run.sources))
    ]
    total = sum(tokens_by_source) or 1
    return [
        f" <em>{format_number(tokens)} · {tokens / total:.1%}</em>" for tokens in tokens_by_source
    ]


def _phase_table(run: RunData) -> str:
    headings = "".join(f'<th colspan="2">{escape(source)}</th>' for source in run.sources)
    subheads = "<th>plan</th><th>realised</th>" * len(run.sources)
    rows = []
    for phase in run.phases():
        total = sum(phase.realised)
        cells = "".join(
            f"<td>{planned:.2%}</td><td>{f'{tokens / total:.2%}' if total else '–'}</td>"
            for planned, tokens in zip(phase.planned, phase.realised, strict=True)
        )
        rows.append(
            f"<tr><th>{escape(phase.name)}</th>"
            f"<td>{format_number(total)} of {format_number(phase.tokens)}</td>"
            f"<td>{phase.batch_rows} × {phase.seq_len:,}</td>{cells}</tr>"
        )
    return (
        '<div class="scroll"><table><thead><tr><th rowspan="2">phase</th>'
        f'<th rowspan="2">tokens</th><th rowspan="2">batch</th>{headings}</tr>'
        f'<tr class="sub">{subheads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _datasets(run: RunData) -> str:
    """Render the run's datasets; empty if no dataset can be read on this machine."""
    plan = run.plan
    table = sources.table(plan) if isinstance(plan, Plan) else ""
    return section("Datasets", table) if table else ""


def _profiles(run: RunData) -> str:
    """Render the tables of `--profile`; empty if no step was traced."""
    blocks = [
        f"<pre>{escape(file.read_text(encoding='utf-8', errors='replace'))}</pre>"
        for file in sorted(run.folder.profiles.glob(PROFILES))
    ]
    return section("Profile", "".join(blocks)) if blocks else ""


def _predicted(run: RunData) -> str:
    """Render the layout plan's prediction beside the measurement; empty without either."""
    if run.stored.measured is None:
        return ""
    table, note = predicted.table(run.stored.measured)
    return section("Predicted and measured", table, unit=note)


def _schedule(run: RunData) -> str:
    """Draw the pipeline's schedule; empty for a single stage."""
    if run.about["schedule"] is None:
        return ""
    drawing, caption = charts.draw_schedule(run.about["schedule"])
    keys = "".join(
        f'<span class="key"><i class="{kind}"></i>{kind}</span>' for kind in ("forward", "backward")
    )
    return section("Schedule", drawing, legend=keys, unit=caption)


def _configuration(run: RunData) -> str:
    layout, model = run.about["layout"], run.about["model"]
    values = {
        "engine": f"{layout['engine']}, {layout['precision']}",
        **({"fp8": run.about["fp8"]} if run.about["fp8"] else {}),
        "layout": f"{layout['processes']} × {layout['device']} = {layout['degrees']}",
        "model": model["pattern"],
        "width": f"{model['width']:,}, vocabulary {model['vocab_size']:,}",
        "optimizer": run.about["optimizer"],
        "seed": str(run.stored.settings["seed"]),
        "plan": run.plan.hash,
        "ledger": run.ledger,
        "checkpoints": ", ".join(f"step {step:,}" for step in run.checkpoints) or "none",
        "folder": str(run.folder.root),
    }
    if attested := [event for event in run.events if event["event"] == ATTESTED]:
        values["kernels"] = _attested(attested[-1])
    if memory := [event["memory"] for event in run.events if event["event"] == "memory"]:
        values["memory by rank"] = _memory_by_rank(memory[-1])
    return f"<section><h2>Configuration</h2>{definitions(values)}</section>"


def _attested(event: dict[str, Any]) -> str:
    """Describe a start's attestation."""
    failed = f"; plain torch in place of {', '.join(event['failed'])}" if event["failed"] else ""
    return f"{event['what']} ({event['digest']}){failed}"


def _memory_by_rank(memory: Sequence[int]) -> str:
    """Format the bytes by rank, or their range for many ranks."""
    if len(memory) <= MAX_RANKS:
        return ", ".join(f"rank {rank} {format_bytes(size)}" for rank, size in enumerate(memory))
    lowest, highest = min(memory), max(memory)
    return (
        f"{format_bytes(lowest)} (rank {memory.index(lowest):,}) to {format_bytes(highest)} "
        f"(rank {memory.index(highest):,}), {len(memory):,} ranks"
    )


def _history(run: RunData) -> str:
    """Render starts and ends, without checkpoints and skipped steps."""
    rows = []
    for event in run.events:
        if event["event"] in ("checkpoint", "memory", EVENT, *SKIPPED):
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        rows.append(
            f"<tr><td>{when}</td><th>{escape(event['event'])}</th><td>step {event['step']:,}</td>"
            f"<td>{escape(_detail(event))}</td></tr>"
        )
    table = scrolling_table("".join(rows), style="history")
    return f"<section><h2>History</h2>{table}</section>"


def _detail(event: dict[str, Any]) -> str:
    if "layout" in event:
        layout = event["layout"]
        processes = f"{layout['processes']} × {layout['device']}"
        return f"{layout['engine']}, {processes}, ready after {format_duration(event['seconds'])}"
    if event["event"] == "first step":
        return f"ended {format_duration(event['seconds'])} after the start"
    if event["event"] == ATTESTED:
        return _attested(event)
    if event["event"] in (STEERED, NOT_STEERED):
        return str(event["what"])
    if "ledger" in event:
        return f"ledger {event['ledger']}"
    return str(event.get("error", "")).splitlines()[0] if event.get("error") else ""
