"""Render an anneal's page: ranking, curves, and how the mixtures differ."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ...console.html.page import comparison_table, page, section, tiles
from ...console.progress import format_number
from ...trainer.folders.folder import RunFolder
from ..report import view
from ..report.reading.data import RunData
from ..report.reading.loss_unit import common_unit
from ..report.reading.stored import StoredRun
from .scores import Ranking

MAX_DRAWN = 10
"""Candidates with curves: more colours could not be told apart."""


def anneal_page(ranking: Ranking, run: str, step: int) -> str:
    """Render a ranking of candidates, which continue `run` at `step`."""
    stored_runs = [
        StoredRun.open(RunFolder(candidate.runs[0].folder), candidate.name)
        for candidate in ranking.candidates[:MAX_DRAWN]
    ]
    unit = common_unit(stored_runs)
    runs = [
        RunData.read(stored, sizes, len(stored_runs))
        for stored, sizes in zip(stored_runs, unit.sizes, strict=True)
    ]
    data, script = view.embed_curves(runs, unit.shown)
    body = [
        f'<header><div><p class="over">headrace · anneal</p><h1>{escape(ranking.best.name)}</h1>'
        f"</div></header><p class='note'>Candidates continue {escape(run)} at step {step:,}. "
        f"{escape(result_sentence(ranking))}</p>",
        tiles(_tiles(ranking, step)),
        section("Ranking", _ranking_table(ranking), unit="held-out bits per byte"),
        view.CONTROLS,
        view.WIDE,
        section("Mixtures", _share_table(ranking), unit="share of each source in all tokens"),
        view.MORE,
        section("Plans and ledgers", _hash_table(ranking)),
        data,
    ]
    title = f"anneal · {ranking.best.name}"
    return page(title, "".join(body), script=script, style=view.style())


def result_sentence(ranking: Ranking) -> str:
    """Return the result for people: the best candidate, and which ones equal it within the
    noise."""
    best, *runners_up = ranking.candidates
    result = f"The best is {best.name}, with {best.score:.4f} bits per byte"
    if runners_up and ranking.noise is None:
        result += (
            f", {runners_up[0].score - best.score:.4f} below the next. Each candidate has one "
            "seed, so the noise is not known (--seeds 2)"
        )
    elif runners_up:
        close = [candidate.name for candidate in runners_up if ranking.is_within_noise(candidate)]
        result += (
            f". Within the noise of seeds ({ranking.noise:.4f}) are also: {', '.join(close)}"
            if close
            else f". All others are worse by more than the noise of seeds ({ranking.noise:.4f})"
        )
    num_waiting = len(ranking.waiting)
    are = "run is" if num_waiting == 1 else "runs are"
    return f"{result}." + (f" {num_waiting} {are} not finished." if num_waiting else "")


def _tiles(ranking: Ranking, step: int) -> list[tuple[str, str, str]]:
    num_tokens = sum(candidate.tokens * len(candidate.runs) for candidate in ranking.candidates)
    num_seeds = max(len(candidate.runs) for candidate in ranking.candidates)
    noise = "–" if ranking.noise is None else f"{ranking.noise:.4f}"
    return [
        ("best", f"{ranking.best.score:.4f}", "bits per byte"),
        ("noise", noise, "of a seed, bits per byte"),
        ("candidates", str(len(ranking.candidates)), f"{len(ranking.waiting)} runs wait"),
        ("seeds", str(num_seeds), "of a candidate"),
        ("tokens spent", format_number(num_tokens), "in all finished runs"),
        ("from step", f"{step:,}", "of the run"),
    ]


def _ranking_table(ranking: Ranking) -> str:
    sources = list(ranking.weights)
    headings = ["", "score", "± seeds", "behind the best", *sources, "tokens", "seeds"]
    rows = []
    for candidate in ranking.candidates:
        error = ranking.standard_error(candidate)
        behind = candidate.score - ranking.best.score
        remark = " (noise)" if ranking.is_within_noise(candidate) else ""
        rows.append(
            [
                candidate.name,
                f"{candidate.score:.4f}",
                "–" if error is None else f"{error:.4f}",
                "" if candidate is ranking.best else f"{behind:.4f}{remark}",
                *(f"{candidate.by_source[source]:.4f}" for source in sources),
                format_number(candidate.tokens),
                str(len(candidate.runs)),
            ]
        )
    weights = ", ".join(f"{name} {weight:.3g}" for name, weight in ranking.weights.items())
    return f"{_table(headings, rows)}<p class='note'>Weights of the score: {escape(weights)}.</p>"


def _share_table(ranking: Ranking) -> str:
    """Render the candidates' shares by source; shares that differ are bold."""
    candidates = ranking.candidates
    sources = dict.fromkeys(source for candidate in candidates for source in candidate.shares)
    rows = []
    for source in sources:
        shares = [candidate.shares.get(source, 0.0) for candidate in candidates]
        differ = max(shares) - min(shares) > 1e-9
        rows.append((differ, [escape(source), *(f"{share:.2%}" for share in shares)]))
    return comparison_table(["", *(escape(candidate.name) for candidate in candidates)], rows)


def _hash_table(ranking: Ranking) -> str:
    """Render the hashes that prove what each run read."""
    rows = [
        [candidate.name, str(run.seed), run.folder, run.plan, run.ledger, f"{run.score:.4f}"]
        for candidate in ranking.candidates
        for run in candidate.runs
    ]
    return _table(["", "seed", "run", "plan", "ledger", "bits per byte"], rows, "proofs")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], css_class: str = "") -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>"
        + "".join(
            f"<{tag}>{escape(cell)}</{tag}>"
            for tag, cell in zip(["th", *["td"] * len(row)], row, strict=False)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{css_class}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
