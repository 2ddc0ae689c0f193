"""A mixture's card, to publish with trained weights: a Markdown page with phases, sources, and an
account of every dataset."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ...console.errors import UserError
from ...console.page import table
from ...console.progress import exact_count
from ...dataplane.account.account import Account, load_account
from ...dataplane.account.fields import describe_field
from ...dataplane.account.sample import MAX_SHARDS, QUANTILES, DatasetSample, take_sample
from ...dataplane.datasets import packing
from ...dataplane.order.plan import PlanSource
from ...dataplane.order.stream import Stream
from .summary import Summary, summarize

_DECIDED = (
    "Decisions about shares while the run went on: {:,}. The numbers below are those of the rows "
    "that follow from them."
)


def render_card(stream: Stream, *, steps: int | None = None) -> str:
    """Render a plan's card. `steps`: how many the weights have seen, if known."""
    summary = summarize(stream)
    cards = [_SourceCard.load(source) for source in stream.plan.sources]
    taken = [] if steps is None else [f"The weights have seen its first {steps:,} steps."]
    sections = [
        [
            f"# Training data of plan {summary.hash[:16]}",
            "",
            f"{summary.tokens:,} tokens in {exact_count(summary.rows, 'rows')} "
            f"and {exact_count(summary.steps, 'steps')}. The "
            "plan's hash covers the content of every row.",
            *taken,
            *([f"It continues the plan `{summary.parent}`."] if summary.parent else []),
            *([_DECIDED.format(summary.decisions)] if summary.decisions else []),
        ],
        ["## Phases", "", *_phase_table(summary)],
        ["## Sources", "", *_source_table(cards, summary)],
        ["## Datasets", "", *_dataset_table(cards)],
        _origin_section(cards),
        _left_out_section(cards),
        _unlearnt_section(summary),
        _lengths_section(cards),
        *(section for card in cards for section in _field_sections(card)),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _phase_table(summary: Summary) -> list[str]:
    names = [use.source for use in summary.total]
    rows = []
    for phase in summary.phases:
        suffix = " (changing)" if phase.changing else ""
        shares = [f"{use.share:.2%}" for use in phase.sources]
        numbers = (f"{phase.tokens:,}", f"{phase.steps:,}", f"{phase.seq_len:,}")
        rows.append((phase.phase + suffix, *numbers, *shares))
    return table(("phase", "tokens", "steps", "row length", *names), rows)


def _source_table(cards: Sequence[_SourceCard], summary: Summary) -> list[str]:
    rows = []
    for card, use in zip(cards, summary.total, strict=True):
        rows.append(
            (
                use.source,
                f"{use.tokens:,}",
                f"{use.share:.2%}",
                f"{card.tokens:,}",
                _format_epochs(use.epochs),
            )
        )
    return table(("source", "tokens", "share", "tokens available", "epochs"), rows)


def _format_epochs(epochs: float) -> str:
    return f"{epochs:.3g}" if epochs < 1 else f"{epochs:.2f}"


def _dataset_table(cards: Sequence[_SourceCard]) -> list[str]:
    head = ("source", "URL", "hash", "documents", "bytes of a token", "padding")
    rows = [
        (card.source.name, f"`{card.source.url}`", f"`{card.source.dataset[:16]}`", *card.totals())
        for card in cards
    ]
    lines = table(head, rows)
    missing = [card.source.name for card in cards if card.account is None]
    if missing:
        lines += ["", f"The datasets of these sources cannot be read: {', '.join(missing)}."]
    return lines


def _origin_section(cards: Sequence[_SourceCard]) -> list[str]:
    rows = [
        (card.source.name, card.account.licenses, card.account.sources)
        for card in cards
        if card.account is not None
    ]
    return ["## Licences and origin", "", *table(("source", "licences", "origin"), rows)]


def _left_out_section(cards: Sequence[_SourceCard]) -> list[str]:
    rows = []
    for card in cards:
        if (account := card.account) is None:
            continue
        for name, count in account.left_out_by_build.items():
            by = f"the build of {account.splits}" if account.splits else "the build"
            rows.append((card.source.name, by, name, f"{count:,}"))
        for name, count in account.left_out_by_view.items():
            rows.append((card.source.name, "the view", name, f"{count:,}"))
    return ["## Left out", "", *table(("source", "by", "kind", "count"), rows)] if rows else []


def _unlearnt_section(summary: Summary) -> list[str]:
    if not summary.unlearnt:
        return []
    rows = [
        (name, f"{tokens:,}", f"{summary.refilled.get(name, 0):,}")
        for name, tokens in summary.unlearnt.items()
    ]
    head = ("source", "tokens of documents without loss", "rows refilled with others")
    return ["## Without documents", "", *table(head, rows)]


def _lengths_section(cards: Sequence[_SourceCard]) -> list[str]:
    rows = [
        (card.source.name, *(f"{tokens:,}" for tokens in card.sample.length_quantiles))
        for card in cards
        if card.sample is not None and len(card.sample.lengths)
    ]
    if not rows:
        return []
    return [
        "## Lengths",
        "",
        "Tokens of a document, or of its piece in a bin. A column says that this share of the "
        "documents is not longer. Lengths, bytes of a token and fields are counted in up to "
        f"{MAX_SHARDS} shards of a dataset.",
        "",
        *table(("source", *(f"{share:.0%}" for share in QUANTILES)), rows),
    ]


def _field_sections(card: _SourceCard) -> list[list[str]]:
    if card.account is None or card.sample is None:
        return []
    return [
        describe_field(key, card.sample, f"## Field `{key}` of {card.source.name}")
        for key in card.account.held.kept_fields
    ]


@dataclass(frozen=True)
class _SourceCard:
    """A source, with the account and sample of the dataset."""

    source: PlanSource
    account: Account | None
    """None if the dataset cannot be read."""
    sample: DatasetSample | None
    """None if the shards cannot be read."""

    @classmethod
    def load(cls, source: PlanSource) -> _SourceCard:
        account = sample = None
        with suppress(UserError):
            account = load_account(source.url, source.generations)
            sample = take_sample(source.url, source.generations)
        return cls(source, account, sample)

    @property
    def tokens(self) -> int:
        """Tokens in the dataset; for a packed one, the order counts one more."""
        return self.source.order.tokens if self.account is None else self.account.held.tokens

    def totals(self) -> tuple[str, str, str]:
        """Format documents, bytes per token, and share of padding."""
        if self.account is None:
            return "unknown", "unknown", "unknown"
        held, ratio = self.account.held, self.sample and self.sample.bytes_of_token
        return (
            f"{packing.count_documents(held):,}",
            "unknown" if ratio is None else f"{ratio:.3f}",
            f"{packing.count_padding(held) / held.tokens:.2%}"
            if packing.bin_length(held)
            else "none",
        )
