"""The account of a dataset: its licences and sources, and the documents that were left out.

The tokens of a view are those of another dataset. So the account of a view is that of this dataset,
with the documents that the view left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..datasets import about, manifest, packing
from ..datasets.about import About
from ..datasets.manifest import Manifest
from ..datasets.view import View, check_dataset, view_of

LEFT_OUT = ("bad: ", "dropped by ", "duplicates", "empty documents")
"""Beginnings of the names of a build's counts of documents that it left out. Others count documents
that stay, or say why some were dropped."""
LEFT_OUT_BY_PACKING = (
    "documents longer than a bin",
    "documents without tokens",
    "tokens after the first bin of a document",
)
NO_IDS = "bad: not tokenizable"
"""The one count of bad records that "documents read" has too: they were read as documents."""
MOST_REASONS = 10
"""Reasons that the end of a build lists."""
NOT_CHOSEN = "documents not chosen"


@dataclass(frozen=True, kw_only=True)
class Account:
    """The account of a dataset, or of its first generations."""

    held: Manifest
    stated: About
    """What people state of it."""
    view: View | None
    base: Manifest
    """The dataset that has the tokens: of a view another one."""
    base_stated: About

    @property
    def licenses(self) -> str:
        """The licences in words."""
        return _in_words(self.stated.licenses, self.base_stated.licenses)

    @property
    def sources(self) -> str:
        """The sources in words."""
        return _in_words(self.stated.sources, self.base_stated.sources)

    @property
    def splits(self) -> str:
        """The splits that the counts of the build are of together; empty for a dataset alone."""
        return splits_in_words(self.base)

    @property
    def left_out_by_build(self) -> dict[str, int]:
        return left_out_of(counts_of(self.base))

    @property
    def other_counts(self) -> dict[str, int]:
        """The other counts of the build."""
        left_out = self.left_out_by_build
        return {name: n for name, n in counts_of(self.base).items() if name not in left_out}

    @property
    def left_out_by_view(self) -> dict[str, int]:
        if self.view is None:
            return {}
        counts = counts_of(self.held)
        by_packing = {name: counts[name] for name in LEFT_OUT_BY_PACKING if name in counts}
        documents = sum(n for name, n in by_packing.items() if name.startswith("documents"))
        not_chosen = self.base.documents - documents - packing.documents_of(self.held)
        return ({NOT_CHOSEN: not_chosen} if not_chosen else {}) | by_packing


def account_of(url: str, generations: int | None = None) -> Account:
    """Return the account of a dataset, or of its first generations."""
    held = _first(manifest.load(url), generations)
    stated = about.load(url)
    view = view_of(url, held)
    check_dataset(url, view)
    if view is None:
        return Account(held=held, stated=stated, view=None, base=held, base_stated=stated)
    return Account(
        held=held,
        stated=stated,
        view=view,
        base=_first(manifest.load(view.url), len(held.generations)),
        base_stated=about.load(view.url),
    )


def left_out_of(counts: Mapping[str, int]) -> dict[str, int]:
    """Return those of a build's counts that are of records it left out: each counts for one."""
    return {name: count for name, count in counts.items() if name.startswith(LEFT_OUT) and count}


def records_read(counts: Mapping[str, int]) -> int:
    """Return the number of records that a build read: those it kept, and those it left out."""
    unread = (name for name in left_out_of(counts) if name.startswith(("bad: ", "empty")))
    return counts.get("documents read", 0) + sum(counts[name] for name in unread if name != NO_IDS)


def described_counts(counts: Mapping[str, int]) -> str:
    """Return how many records a build read and kept, and how many it left out for each reason."""
    read, left_out = records_read(counts), left_out_of(counts)
    reasons = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    listed = [f"{count:,} {name}" for name, count in reasons[:MOST_REASONS]]
    if rest := sum(count for _, count in reasons[MOST_REASONS:]):
        listed.append(f"{rest:,} for other reasons (`tokenize inspect` lists them)")
    words = f"read {read:,} records, kept {read - sum(left_out.values()):,}"
    return "; ".join([words, f"left out: {', '.join(listed)}"] if listed else [words])


def splits_in_words(held: Manifest) -> str:
    """Return the splits of the build that a dataset is one of: each has the counts of the build,
    because a record that is left out belongs to no split. Empty for a build without splits."""
    names = [name for name, _ in held.settings.get("splits", ())]
    return f"{', '.join(['train', *names[:-1]])} and {names[-1]} together" if names else ""


def counts_of(held: Manifest) -> dict[str, int]:
    """Return the sums of the counts of all generations, by name."""
    counts: Counter[str] = Counter()
    for made in held.generations:
        counts.update(made.provenance.get("counts", {}))
    return {name: count for name, count in sorted(counts.items()) if count}


def _first(held: Manifest, generations: int | None) -> Manifest:
    return replace(held, generations=held.generations[:generations])


def _in_words(own: Sequence[str], of_base: Sequence[str]) -> str:
    if own:
        return "; ".join(own)
    return f"{'; '.join(of_base)} (as its dataset states)" if of_base else "not stated"
