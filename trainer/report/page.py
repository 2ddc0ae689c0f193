"""Page of one run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from typing import Any

from ...console.progress import as_bytes, duration, human
from ...dataplane.order.plan import Plan
from ...models.accounting.show import shown_active
from ..board.runs import SKIPPED
from ..costs.describe import degrees
from ..costs.measured import EVENT
from ..drawing.page import definitions, layer_stripe, legend, page, section, tiles
from ..scores.recall_chart import recall_section
from ..scores.records import scores_section
from . import charts, predicted, schedule, signals, sources
from .data import RunData
from .outliers import DEVIATIONS, WINDOW, OutlierStep, find_outliers

NATS = "nats per token"
POINT = f"{NATS} · hover for the steps"


def run_page(run: RunData) -> str:
    outliers = find_outliers(run)
    body = [
        _header(run),
        _failure(run),
        _tiles(run),
        section("Loss", charts.loss(run, outliers), legend=_loss_keys(run, outliers), unit=POINT),
        _outliers(run, outliers),
        _skipped(run),
        signals.stragglers(run),
        held_out([run]),
        scores_section(run.scores),
        recall_section(run.recall),
        section("Learning rate", charts.learning_rate(run)),
        section(
            "Mixture",
            charts.mixture(run) + _phase_table(run),
            legend=legend(run.sources, _overall(run)),
        ),
        _datasets(run),
        '<div class="pair">',
        section("Tokens per second", charts.small(run, "tokens_per_second", "tokens per second")),
        _source_speeds(run),
        section(
            "Gradient norm",
            charts.small(run, "grad_norm", "gradient norm"),
            unit="before clipping",
        ),
        section(
            "Data wait",
            charts.small(run, "data_wait", "data wait, percent of the step", percent=True),
            unit="percent of the step",
        ),
        section("Seconds per step", charts.small(run, "seconds", "seconds per step")),
        _memory(run),
        signals.slowest_rank(run),
        _expert_load(run),
        "</div>",
        _predicted(run),
        _schedule(run),
        _configuration(run),
        _history(run),
    ]
    return page(run.name, "".join(body))


def _source_speeds(run: RunData) -> str:
    """Return the chart of the speed by source, for a run of several sources."""
    if len(run.sources) == 1:
        return ""
    keys = legend(run.sources)
    return section("Tokens per second by source", charts.source_speeds(run), legend=keys)


def _memory(run: RunData) -> str:
    """Return the chart of the memory, for a run on devices that count it."""
    if not run.memory:
        return ""
    label = "most bytes that a rank holds"
    return section("Memory", charts.small(run, "memory", label, label=as_bytes), unit=label)


def _expert_load(run: RunData) -> str:
    """Return the chart of the imbalance between ranks, for a run that split its experts."""
    if not any("expert_load" in entry for entry in run.metrics):
        return ""
    label = "rows of the busiest rank's experts, in multiples of the mean"
    return section("Expert load", charts.small(run, "expert_load", label), unit="max / mean")


def held_out(runs: Sequence[RunData], unit: str = NATS) -> str:
    evaluated = [run for run in runs if run.evaluations]
    if not evaluated:
        return ""
    if len(runs) > 1:
        return section(
            "Held-out loss",
            charts.held_out(runs),
            legend=legend([run.name for run in runs]),
            unit=unit,
        )
    _, *sources = runs[0].held_out_curves()
    last = runs[0].evaluations[-1]["sources"]
    notes = [f" <em>{last[name]['loss']:.4f}</em>" if name in last else "" for name in sources]
    keys = '<span class="key"><b></b>all</span>' + legend(sources, notes)
    return section("Held-out loss", charts.held_out(runs), legend=keys, unit=NATS)


def _failure(run: RunData) -> str:
    """Return the error of a failed run; it stands first on the page."""
    return f'<section class="failure"><pre>{escape(run.error)}</pre></section>' if run.error else ""


def _loss_keys(run: RunData, outliers: Sequence[OutlierStep]) -> str:
    return (
        '<span class="key"><b></b>all tokens</span>'
        + (legend(run.sources) if len(run.sources) > 1 else "")
        + ('<span class="key"><s></s>outlier</span>' if outliers else "")
        + ('<span class="key"><u class="restart"></u>restart</span>' if run.restarts else "")
        + ('<span class="key"><u class="skipped"></u>skipped</span>' if run.skipped else "")
    )


def _outliers(run: RunData, outliers: Sequence[OutlierStep]) -> str:
    """Return the table of outlier steps, with their possible causes."""
    if not outliers:
        return ""
    rows = "".join(
        f"<tr><th>{step.step:,}</th><td>{escape(step.entry['phase'])}</td>"
        f"<td>{_with_usual(step.entry['loss'], step.usual)}</td>"
        f"<td>{'<br>'.join(_source(*source) for source in step.risen)}</td>"
        f"<td>{_with_usual(step.entry['grad_norm'], step.usual_norm, '.3g')}</td>"
        f"<td>{escape('; '.join(step.events))}</td></tr>"
        for step in outliers
    )
    heads = ("step", "phase", "loss", "by source", "gradient norm", "events before")
    head = "".join(f"<th>{name}</th>" for name in heads)
    table = (
        f'<div class="scroll"><table class="history"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    worst = max(outliers, key=lambda step: step.deviations)
    audit = f"mixtures audit {run.job.folder.root} --step {worst.step} --text"
    note = (
        f"The loss of all tokens, or of one source, is above each of the {WINDOW} losses before "
        f"it, and above their median by more than {DEVIATIONS:g} deviations. Grey: the median of "
        "those steps. To see the rows of a step: "
        f"<code>{escape(audit)}</code>"
    )
    return section("Outlier steps", f'{table}<p class="note">{note}</p>')


def _source(name: str, loss: float, usual: float | None) -> str:
    value = _with_usual(loss, usual) if usual is not None else f"{loss:.4f} <em>new</em>"
    return f"{escape(name)} {value}"


def _with_usual(value: float | None, usual: float | None, form: str = ".4f") -> str:
    """Return a number, and in grey the usual one."""
    text = f"{value:{form}}" if value is not None else "not finite"
    return text if usual is None else f"{text}&nbsp;<em>{usual:{form}}</em>"


def _skipped(run: RunData) -> str:
    """Return the table of skipped steps, with their rows."""
    if not run.skipped:
        return ""
    rows = "".join(
        f"<tr><th>{event['step']:,}</th><td>{escape(event['event'])}</td>"
        f"<td>{escape(event['what'].partition(': ')[2] or event['what'])}</td>"
        f"<td>{escape(event['where'])}</td>"
        f"<td>{_back(event)}</td></tr>"
        for event in run.skipped
    )
    table = f'<div class="scroll"><table class="history"><tbody>{rows}</tbody></table></div>'
    return section("Skipped steps", table)


def _back(event: dict[str, Any]) -> str:
    return f"rolled back to step {event['back_to']:,}" if "back_to" in event else "skipped"


def _header(run: RunData) -> str:
    return (
        f'<header><div><p class="over">headrace · run</p><h1>{escape(run.name)}</h1></div>'
        f'<span class="status {run.status}">{run.status}</span></header>{_stripe(run)}'
    )


def _stripe(run: RunData) -> str:
    """Return the model as a stripe, a cell for each layer."""
    layers = run.job.model.layers
    model = run.about["model"]
    count, active = model["parameters"], model["active_parameters"]
    note = f"{human(count)} parameters{shown_active(count, active)} in {len(layers)} layers"
    return layer_stripe([layer.mixer for layer in layers], note)


def _tiles(run: RunData) -> str:
    planned = run.job.plan.tokens
    loss = run.loss
    mfu = [entry["mfu"] for entry in run.metrics if entry["mfu"] is not None]
    hfu = [entry["hfu"] for entry in run.metrics if entry.get("hfu") is not None]
    utilisation = (
        f"MFU {_mean(mfu):.1%}" + (f", HFU {_mean(hfu):.1%}" if hfu else "") if mfu else ""
    )
    figures = [
        ("tokens", human(run.tokens), f"{_percent(run.tokens / planned)} of {human(planned)}"),
        ("loss", f"{loss:.4f}" if loss is not None else "not finite", _loss_note(run)),
        (
            "steps",
            f"{len(run.metrics):,}",
            f"of {run.job.plan.steps:,}",
        ),
        (
            "tokens per second",
            human(run.tokens_per_second),
            utilisation or run.about["layout"]["device"].upper(),
        ),
        ("data wait", f"{run.data_wait:.2%}", "of the time"),
        ("time", duration(run.seconds), _restart_note(run)),
    ]
    return tiles(figures)


def _percent(part: float) -> str:
    """Return a percentage: 100% only at the end, 0% only at the start."""
    return f"{int(100 * part)}%" if part >= 0.01 else f"{100 * part:.2g}%"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _loss_note(run: RunData) -> str:
    first, count = run.metrics[0]["loss"], run.last_steps
    last = f"last {count} steps, " if count > 1 else ""
    return f"{last}from {first:.3g}" if first is not None else ""


def _restart_note(run: RunData) -> str:
    count = len(run.restarts)
    return f"{count} restart{'s' * (count != 1)}" if count else "no restart"


def _overall(run: RunData) -> list[str]:
    """Return each source's tokens, and its share of all tokens."""
    phases = run.phases()
    taken = [sum(phase.realised[i] for phase in phases) for i in range(len(run.sources))]
    total = sum(taken) or 1
    return [f" <em>{human(tokens)} · {tokens / total:.1%}</em>" for tokens in taken]


def _phase_table(run: RunData) -> str:
    heads = "".join(f'<th colspan="2">{escape(source)}</th>' for source in run.sources)
    under = "<th>plan</th><th>realised</th>" * len(run.sources)
    rows = []
    for phase in run.phases():
        taken = sum(phase.realised)
        cells = "".join(
            f"<td>{planned:.2%}</td><td>{f'{tokens / taken:.2%}' if taken else '–'}</td>"
            for planned, tokens in zip(phase.planned, phase.realised, strict=True)
        )
        rows.append(
            f"<tr><th>{escape(phase.name)}</th><td>{human(taken)} of {human(phase.tokens)}</td>"
            f"<td>{phase.batch_rows} × {phase.seq_len:,}</td>{cells}</tr>"
        )
    return (
        '<div class="scroll"><table><thead><tr><th rowspan="2">phase</th>'
        f'<th rowspan="2">tokens</th><th rowspan="2">batch</th>{heads}</tr>'
        f'<tr class="sub">{under}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _datasets(run: RunData) -> str:
    """Return the table of the run's datasets; empty if none of them can be read here."""
    plan = run.job.plan
    table = sources.table(plan) if isinstance(plan, Plan) else ""
    return section("Datasets", table) if table else ""


def _predicted(run: RunData) -> str:
    """Return the prediction of the layout plan beside the measurement; empty without both."""
    if run.measured is None:
        return ""
    table, note = predicted.table(run.measured)
    return section("Predicted and measured", table, unit=note)


def _schedule(run: RunData) -> str:
    """Return the drawing of the pipeline's schedule; empty for one stage."""
    if len(run.about["stages"]) == 1:
        return ""
    drawing, note = schedule.draw(run.job)
    keys = "".join(
        f'<span class="key"><i class="{kind}"></i>{kind}</span>' for kind in ("forward", "backward")
    )
    return section("Schedule", drawing, legend=keys, unit=note)


def _configuration(run: RunData) -> str:
    layout = run.about["layout"]
    values = {
        "engine": f"{layout['engine']}, {layout['precision']}",
        **({"fp8": run.about["fp8"]} if run.about["fp8"] else {}),
        "layout": f"{layout['processes']} × {layout['device']} = {degrees(layout)}",
        "model": run.job.model.pattern,
        "width": f"{run.job.model.width:,}, vocabulary {run.job.model.vocab_size:,}",
        "optimizer": run.job.run.optimizer.describe(),
        "seed": str(run.job.run.seed),
        "plan": run.job.plan.hash,
        "ledger": run.ledger,
        "checkpoints": ", ".join(f"step {step:,}" for step in run.checkpoints) or "none",
        "folder": str(run.job.folder.root),
    }
    return f"<section><h2>Configuration</h2>{definitions(values)}</section>"


def _history(run: RunData) -> str:
    """Return the table of starts and ends, without checkpoints and skipped steps."""
    rows = []
    for event in run.events:
        if event["event"] in ("checkpoint", EVENT, *SKIPPED):
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        rows.append(
            f"<tr><td>{when}</td><th>{escape(event['event'])}</th><td>step {event['step']:,}</td>"
            f"<td>{escape(_detail(event))}</td></tr>"
        )
    return (
        '<section><h2>History</h2><div class="scroll"><table class="history"><tbody>'
        f"{''.join(rows)}</tbody></table></div></section>"
    )


def _detail(event: dict[str, Any]) -> str:
    if "layout" in event:
        layout = event["layout"]
        text = f"{layout['engine']}, {layout['processes']} × {layout['device']}"
        return f"{text}, ready after {duration(event['seconds'])}"
    if event["event"] == "first step":
        return f"ended {duration(event['seconds'])} after the start"
    if "ledger" in event:
        return f"ledger {event['ledger']}"
    return str(event.get("error", "")).splitlines()[0] if event.get("error") else ""
