"""A mixture's card: a page of Markdown with its phases, its sources and their licences. It goes
with the weights that were trained on it."""

from __future__ import annotations

from ...console.errors import UserError
from ...console.markdown import table
from ...dataplane.datasets import about, manifest
from ...dataplane.datasets.packing import length_of, padding_of
from ...dataplane.order.plan import PlanSource
from ...dataplane.order.stream import Stream
from .summary import Summary, summarize


def card(stream: Stream, *, steps: int | None = None) -> str:
    """Return the card of a plan; `steps` of it are taken, if they are known."""
    summary = summarize(stream)
    taken = [] if steps is None else [f"The weights have seen its first {steps:,} steps."]
    parts = [
        [
            f"# Training data of plan {summary.hash[:16]}",
            "",
            f"{summary.tokens:,} tokens in {summary.rows:,} rows and {summary.steps:,} steps. The "
            "plan's hash covers the content of every row.",
            *taken,
            *([f"It continues the plan `{summary.parent}`."] if summary.parent else []),
        ],
        ["## Phases", "", *_phases(summary)],
        ["## Sources", "", *_sources(stream, summary)],
        ["## Datasets", "", *_datasets(stream)],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _phases(summary: Summary) -> list[str]:
    names = [use.source for use in summary.total]
    rows = []
    for phase in summary.phases:
        mark = " (changing)" if phase.changing else ""
        shares = [f"{use.share:.2%}" for use in phase.sources]
        numbers = (f"{phase.tokens:,}", f"{phase.steps:,}", f"{phase.seq_len:,}")
        rows.append((phase.phase + mark, *numbers, *shares))
    return table(("phase", "tokens", "steps", "row length", *names), rows)


def _sources(stream: Stream, summary: Summary) -> list[str]:
    rows = []
    for source, use in zip(stream.plan.sources, summary.total, strict=True):
        available = f"{source.order.tokens:,}"
        rows.append(
            (use.source, f"{use.tokens:,}", f"{use.share:.2%}", available, _epochs(use.epochs))
        )
    return table(("source", "tokens", "share", "tokens available", "epochs"), rows)


def _epochs(epochs: float) -> str:
    return f"{epochs:.3g}" if epochs < 1 else f"{epochs:.2f}"


def _datasets(stream: Stream) -> list[str]:
    rows = [
        (source.name, f"`{source.url}`", f"`{source.dataset[:16]}`", *_stated(source))
        for source in stream.plan.sources
    ]
    head = ("source", "URL", "hash", "licences", "origin", "left out by its build", "padding")
    return table(head, rows)


def _stated(source: PlanSource) -> tuple[str, str, str, str]:
    """Return the licences, the origin, the counts of dropped documents, and the padding of a
    source's dataset; a dataset that cannot be read any more is named as such."""
    try:
        stated = about.load(source.url)
        held = manifest.load(source.url)
    except UserError:
        return "the dataset cannot be read", "", "", ""
    generations = held.generations[: source.generations]
    counts: dict[str, int] = {}
    for made in generations:
        for name, count in made.provenance.get("counts", {}).items():
            counts[name] = counts.get(name, 0) + count
    left_out = "; ".join(f"{name}: {count:,}" for name, count in sorted(counts.items()) if count)
    return (
        "; ".join(stated.licenses) or "not stated",
        "; ".join(stated.sources) or "not stated",
        left_out or "nothing",
        f"{padding_of(held, source.generations) / source.order.tokens:.2%}"
        if length_of(held)
        else "none",
    )
