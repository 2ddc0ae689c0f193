"""The page of an anneal: ranking, curves, and how the mixtures differ."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ...console.html.page import page, section, sides, tiles
from ...console.progress import human
from ...trainer.folders.folder import RunFolder
from ..report import view
from ..report.reading.data import RunData
from ..report.reading.loss_unit import common_unit
from ..report.reading.stored import StoredRun
from .scores import Ranking

DRAWN = 10
"""Candidates whose curves are drawn: more colours could not be told apart."""


def anneal_page(ranking: Ranking, run: str, step: int) -> str:
    """Return the page of a ranking of candidates that continue a run at a step."""
    drawn = ranking.candidates[:DRAWN]
    stored = [StoredRun.open(RunFolder(each.runs[0].folder), each.name) for each in drawn]
    unit = common_unit(stored)
    runs = [
        RunData.read(run, sizes, len(stored)) for run, sizes in zip(stored, unit.sizes, strict=True)
    ]
    data, script = view.with_curves(runs, unit.shown)
    body = [
        f'<header><div><p class="over">headrace · anneal</p><h1>{escape(ranking.best.name)}</h1>'
        f"</div></header><p class='note'>Candidates continue {escape(run)} at step {step:,}. "
        f"{escape(sentence(ranking))}</p>",
        tiles(_tiles(ranking, step)),
        section("Ranking", _ranking(ranking), unit="held-out bits per byte"),
        view.CONTROLS,
        view.WIDE,
        section("Mixtures", _mixtures(ranking), unit="share of each source in all tokens"),
        view.MORE,
        section("Plans and ledgers", _proofs(ranking)),
        data,
    ]
    title = f"anneal · {ranking.best.name}"
    return page(title, "".join(body), script=script, style=view.style())


def sentence(ranking: Ranking) -> str:
    """Return the result in words."""
    best, others = ranking.best, ranking.candidates[1:]
    text = f"The best is {best.name}, with {best.score:.4f} bits per byte"
    if others and ranking.noise is None:
        text += (
            f", {others[0].score - best.score:.4f} below the next. Each candidate has one seed, so "
            "the noise is not known (--seeds 2)"
        )
    elif others:
        unclear = [each.name for each in others if not ranking.is_clear(each)]
        text += (
            f". Within the noise of seeds ({ranking.noise:.4f}) are also: {', '.join(unclear)}"
            if unclear
            else f". All others are worse by more than the noise of seeds ({ranking.noise:.4f})"
        )
    waiting = len(ranking.waiting)
    return f"{text}." + (
        f" {waiting} {'run is' if waiting == 1 else 'runs are'} not finished." if waiting else ""
    )


def _tiles(ranking: Ranking, step: int) -> list[tuple[str, str, str]]:
    tokens = sum(each.tokens * len(each.runs) for each in ranking.candidates)
    noise = "–" if ranking.noise is None else f"{ranking.noise:.4f}"
    return [
        ("best", f"{ranking.best.score:.4f}", "bits per byte"),
        ("noise", noise, "of a seed, bits per byte"),
        ("candidates", str(len(ranking.candidates)), f"{len(ranking.waiting)} runs wait"),
        ("seeds", str(max(len(each.runs) for each in ranking.candidates)), "of a candidate"),
        ("tokens spent", human(tokens), "in all finished runs"),
        ("from step", f"{step:,}", "of the run"),
    ]


def _ranking(ranking: Ranking) -> str:
    sources = list(ranking.weights)
    head = ["", "score", "± seeds", "behind the best", *sources, "tokens", "seeds"]
    rows = []
    for each in ranking.candidates:
        error, clear = ranking.error(each), ranking.is_clear(each)
        behind = each.score - ranking.best.score
        remark = "" if clear is None or each is ranking.best or clear else " (noise)"
        rows.append(
            [
                each.name,
                f"{each.score:.4f}",
                "–" if error is None else f"{error:.4f}",
                "" if each is ranking.best else f"{behind:.4f}{remark}",
                *(f"{each.by_source[name]:.4f}" for name in sources),
                human(each.tokens),
                str(len(each.runs)),
            ]
        )
    weights = ", ".join(f"{name} {weight:.3g}" for name, weight in ranking.weights.items())
    return f"{_table(head, rows)}<p class='note'>Weights of the score: {escape(weights)}.</p>"


def _mixtures(ranking: Ranking) -> str:
    """Return the shares of all candidates; those that differ are bold."""
    sources = list(dict.fromkeys(name for each in ranking.candidates for name in each.shares))
    rows = []
    for source in sources:
        shares = [each.shares.get(source, 0.0) for each in ranking.candidates]
        differ = max(shares) - min(shares) > 1e-9
        rows.append((differ, [escape(source), *(f"{share:.2%}" for share in shares)]))
    return sides(["", *(escape(each.name) for each in ranking.candidates)], rows)


def _proofs(ranking: Ranking) -> str:
    rows = [
        [each.name, str(run.seed), run.folder, run.plan, run.ledger, f"{run.score:.4f}"]
        for each in ranking.candidates
        for run in each.runs
    ]
    return _table(["", "seed", "run", "plan", "ledger", "bits per byte"], rows, "proofs")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
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
        f'<div class="scroll"><table class="{kind}"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
