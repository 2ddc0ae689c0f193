"""A mixture's card: a page of Markdown with its phases and sources, and the account of each
source's dataset. It goes with the weights that were trained on it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ...console.errors import UserError
from ...console.page import table
from ...dataplane.account.account import Account, account_of
from ...dataplane.account.fields import described_field
from ...dataplane.account.sample import QUANTILES, SHARDS, Sample, sample_of
from ...dataplane.datasets import packing
from ...dataplane.order.plan import PlanSource
from ...dataplane.order.stream import Stream
from .summary import Summary, summarize


def card(stream: Stream, *, steps: int | None = None) -> str:
    """Return the card of a plan; `steps` of it are taken, if they are known."""
    summary = summarize(stream)
    described = [_Described.of(source) for source in stream.plan.sources]
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
        ["## Sources", "", *_sources(described, summary)],
        ["## Datasets", "", *_datasets(described)],
        _origin(described),
        _left_out(described),
        _lengths(described),
        *(part for each in described for part in _fields(each)),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _phases(summary: Summary) -> list[str]:
    names = [use.source for use in summary.total]
    rows = []
    for phase in summary.phases:
        mark = " (changing)" if phase.changing else ""
        shares = [f"{use.share:.2%}" for use in phase.sources]
        numbers = (f"{phase.tokens:,}", f"{phase.steps:,}", f"{phase.seq_len:,}")
        rows.append((phase.phase + mark, *numbers, *shares))
    return table(("phase", "tokens", "steps", "row length", *names), rows)


def _sources(described: Sequence[_Described], summary: Summary) -> list[str]:
    rows = []
    for each, use in zip(described, summary.total, strict=True):
        rows.append(
            (
                use.source,
                f"{use.tokens:,}",
                f"{use.share:.2%}",
                f"{each.tokens:,}",
                _epochs(use.epochs),
            )
        )
    return table(("source", "tokens", "share", "tokens available", "epochs"), rows)


def _epochs(epochs: float) -> str:
    return f"{epochs:.3g}" if epochs < 1 else f"{epochs:.2f}"


def _datasets(described: Sequence[_Described]) -> list[str]:
    head = ("source", "URL", "hash", "documents", "bytes of a token", "padding")
    rows = [
        (each.source.name, f"`{each.source.url}`", f"`{each.source.dataset[:16]}`", *each.totals())
        for each in described
    ]
    lines = table(head, rows)
    missing = [each.source.name for each in described if each.account is None]
    if missing:
        lines += ["", f"The datasets of these sources cannot be read: {', '.join(missing)}."]
    return lines


def _origin(described: Sequence[_Described]) -> list[str]:
    rows = [
        (each.source.name, each.account.licenses, each.account.sources)
        for each in described
        if each.account is not None
    ]
    return ["## Licences and origin", "", *table(("source", "licences", "origin"), rows)]


def _left_out(described: Sequence[_Described]) -> list[str]:
    rows = []
    for each in described:
        if (account := each.account) is None:
            continue
        for name, count in account.left_out_by_build.items():
            by = f"the build of {account.splits}" if account.splits else "the build"
            rows.append((each.source.name, by, name, f"{count:,}"))
        for name, count in account.left_out_by_view.items():
            rows.append((each.source.name, "the view", name, f"{count:,}"))
    return ["## Left out", "", *table(("source", "by", "kind", "count"), rows)] if rows else []


def _lengths(described: Sequence[_Described]) -> list[str]:
    rows = [
        (each.source.name, *(f"{tokens:,}" for tokens in each.sample.length_quantiles))
        for each in described
        if each.sample is not None and len(each.sample.lengths)
    ]
    if not rows:
        return []
    return [
        "## Lengths",
        "",
        "Tokens of a document, or of its piece in a bin. A column says that this share of the "
        "documents is not longer. Lengths, bytes of a token and fields are counted in up to "
        f"{SHARDS} shards of a dataset.",
        "",
        *table(("source", *(f"{share:.0%}" for share in QUANTILES)), rows),
    ]


def _fields(each: _Described) -> list[list[str]]:
    if each.account is None or each.sample is None:
        return []
    return [
        described_field(key, each.sample, f"## Field `{key}` of {each.source.name}")
        for key in each.account.held.kept_fields
    ]


@dataclass(frozen=True)
class _Described:
    """A source, with the account and the sample of its dataset."""

    source: PlanSource
    account: Account | None
    """None if the dataset cannot be read any more."""
    sample: Sample | None
    """None if its shards cannot be read."""

    @classmethod
    def of(cls, source: PlanSource) -> _Described:
        account = sample = None
        with suppress(UserError):
            account = account_of(source.url, source.generations)
            sample = sample_of(source.url, source.generations)
        return cls(source, account, sample)

    @property
    def tokens(self) -> int:
        """The tokens of the dataset. Those of the order are one more if it is packed."""
        return self.source.order.tokens if self.account is None else self.account.held.tokens

    def totals(self) -> tuple[str, str, str]:
        """Return the documents, the bytes of a token, and the share of padding."""
        if self.account is None:
            return "unknown", "unknown", "unknown"
        held, ratio = self.account.held, self.sample and self.sample.bytes_of_token
        return (
            f"{packing.documents_of(held):,}",
            "unknown" if ratio is None else f"{ratio:.3f}",
            f"{packing.padding_of(held) / held.tokens:.2%}" if packing.length_of(held) else "none",
        )
