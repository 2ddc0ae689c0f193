"""Render a comparison's page: loss over tokens, recall by length, speed, bytes of state, proofs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from ...console.html.chart import BOTTOM, LINE, Chart, Curve, bounds
from ...console.html.page import HALF, WIDE, colour, legend, page, scrolling_table, section, tiles
from ...console.progress import format_bytes, format_number
from .results import STATE_LENGTHS, Comparison

HEIGHT = 250


def comparison_page(comparison: Comparison) -> str:
    models = comparison.models
    body = [
        '<header><div><p class="over">headrace · hybrids</p><h1>The same rows, '
        f"{len(models)} models</h1></div></header>"
        f'<p class="note">{escape(rows_sentence(comparison))} {escape(noise_sentence(comparison))}'
        "</p>",
        tiles(_tiles(comparison)),
        _losses(comparison),
        _recall(comparison),
        _state(comparison),
        section("Runs", _runs_table(comparison)),
        section("Rows", _proof_table(comparison), unit="hashes of the plan and of all rows"),
    ]
    return page("hybrids", "".join(body))


def rows_sentence(comparison: Comparison) -> str:
    count = len(comparison.results)
    return (
        f"All {count} ledgers have the hash {comparison.ledger} after step {comparison.step - 1:,}:"
        f" the same {comparison.tokens:,} tokens in the same order."
    )


def noise_sentence(comparison: Comparison) -> str:
    """Say which models differ from the first by more than the noise of seeds."""
    first, noise = comparison.seeds[0].model, comparison.noise
    if noise is None:
        return f"{first} has one seed, so the noise is not known (--seeds 3)."
    mean = comparison.mean_bits(first)
    differing = [
        f"{name} ({bits - mean:+.4f})"
        for name in (*comparison.models, *comparison.peers)
        if name != first
        and (bits := comparison.mean_bits(name)) is not None
        and mean is not None
        and abs(bits - mean) > 2 * noise * math.sqrt(1 + 1 / len(comparison.seeds))
    ]
    distance = f"A seed of {first} has a standard deviation of {noise:.4f} bits per byte"
    if not differing:
        return f"{distance}; no model is more than two of them away."
    return f"{distance}; more than two of them from {first}: {', '.join(differing)}."


def _tiles(comparison: Comparison) -> list[tuple[str, str, str]]:
    noise = "–" if comparison.noise is None else f"{comparison.noise:.4f}"
    counts = list(comparison.parameters.values())
    return [
        ("tokens", format_number(comparison.tokens), "read by each run"),
        ("models", str(len(comparison.models)), f"{len(comparison.peers)} peers"),
        ("parameters", format_number(min(counts)), f"to {format_number(max(counts))}"),
        ("seeds", str(len(comparison.seeds)), f"of {comparison.seeds[0].model}"),
        ("noise", noise, "of a seed, bits per byte"),
    ]


def _losses(comparison: Comparison) -> str:
    results = [result for result in comparison.results if result.bits]
    if not results:
        return ""
    values = [bits for result in results for bits in result.bits]
    chart = Chart(
        WIDE,
        320,
        (0.0, float(comparison.tokens)),
        bounds(values),
        lambda bits: f"{bits:.2f}",
    )
    chart.axes()
    names = comparison.names
    for result in reversed(results):
        style = "strong" if result is comparison.first(result.model) else "thin"
        curve = Curve([float(n) for n in result.tokens], list(result.bits))
        chart.line(curve, style, colour(names.index(result.model)))
    note = (
        '<p class="note">The mean over the held-out sources. Thin: further seeds of '
        f"{escape(comparison.seeds[0].model)}.</p>"
    )
    drawn = chart.render("held-out bits per byte over tokens")
    return section("Held-out loss", drawn + note, legend(names), unit="bits per byte")


def _recall(comparison: Comparison) -> str:
    """Draw the share of right answers by length, a chart for each task."""
    tasks = dict.fromkeys(task for result in comparison.results for task in result.recall)
    charts, rows = [], []
    for task in tasks:
        results = [result for name in comparison.names if (result := comparison.first(name)).recall]
        lengths = [int(score["length"]) for score in results[0].recall[task]]
        chart = _length_chart(lengths, (0.0, 1.0), lambda share: f"{share:.0%}", "of context")
        for result in results:
            scores = result.recall[task]
            curve = Curve(
                [math.log2(score["length"]) for score in scores],
                [score["accuracy"] for score in scores],
            )
            chart.line(curve, "strong", colour(comparison.names.index(result.model)))
            cells = [f"{s['accuracy']:.1%} <em>{s['loss']:.2f}</em>" for s in scores]
            rows.append(_row([task, escape(result.model), *cells]))
        charts.append(f"<div><h3>{task}</h3>{chart.render(f'{task} by length')}</div>")
    if not charts:
        return ""
    heads = ["task", "model", *(f"{length:,} tokens" for length in lengths)]
    return section(
        "Recall by length",
        f'<div class="two">{"".join(charts)}</div>{scrolling_table("".join(rows), heads)}',
        legend(comparison.names),
        unit="right answers · loss of an answer's token, nats",
    )


def _state(comparison: Comparison) -> str:
    counts = [math.log2(n) for counts in comparison.state_bytes.values() for n in counts]
    chart = _length_chart(
        STATE_LENGTHS, bounds(counts), lambda power: format_bytes(2.0**power), "generated"
    )
    for name, numbers in comparison.state_bytes.items():
        points = Curve([math.log2(n) for n in STATE_LENGTHS], [math.log2(n) for n in numbers])
        chart.line(points, "strong", colour(comparison.names.index(name)))
    rows = "".join(
        _row([escape(name), *map(format_bytes, numbers)])
        for name, numbers in comparison.state_bytes.items()
    )
    heads = ["", *(f"{length:,} tokens" for length in STATE_LENGTHS)]
    return section(
        "State in generation",
        chart.render("bytes of a sequence over its length") + scrolling_table(rows, heads),
        legend(list(comparison.state_bytes)),
        unit="of a sequence",
    )


def _length_chart(
    lengths: Sequence[int], span: tuple[float, float], label: Callable[[float], str], unit: str
) -> Chart:
    """Return a chart over lengths, whose axis is logarithmic."""
    ticks = [math.log2(length) for length in lengths]
    chart = Chart(
        HALF,
        HEIGHT,
        (ticks[0] - 0.2, ticks[-1] + 0.2),
        span,
        label,
        bottom=BOTTOM + LINE,
        x_label=lambda tick: format_number(round(2**tick)),
        x_unit=f"tokens {unit}",
        x_places=ticks,
    )
    chart.axes()
    return chart


def _runs_table(comparison: Comparison) -> str:
    sources = list(comparison.results[0].by_source)
    rows = [
        _row([
            escape(result.name),
            format_number(comparison.parameters[result.model]) if result.seed is not None else "",
            f"{result.bits[-1]:.4f}" if result.bits else "–",
            *(f"{result.by_source[source]:.4f}" for source in result.by_source),
            f"{result.tokens_per_second:,.0f}",
        ])
        for result in comparison.results
    ]  # fmt: skip
    heads = ["", "parameters", "bits per byte", *map(escape, sources), "tokens/s"]
    return scrolling_table("".join(rows), heads)


def _proof_table(comparison: Comparison) -> str:
    rows = [_row([escape(r.name), comparison.plan, r.ledger]) for r in comparison.results]
    return scrolling_table("".join(rows), ["", "plan", f"ledger, step {comparison.step - 1:,}"])


def _row(cells: Sequence[str]) -> str:
    head, *rest = cells
    return f"<tr><th>{head}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>"
