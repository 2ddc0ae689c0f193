"""The account of a dataset: licences, sources, and documents that were left out.

A view has its tokens from another dataset, so its account combines that dataset's with the
documents that the view left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...console.progress import exact_count
from ..datasets import about, manifest, packing
from ..datasets.about import About
from ..datasets.manifest import Manifest
from ..datasets.view import View, check_dataset, parse_view

LEFT_OUT = ("bad: ", "dropped by ", "duplicates", "empty documents")
"""Prefixes of build counts for left-out documents. Further counts concern kept documents, or break
a left-out count down by reason."""
LEFT_OUT_BY_PACKING = (
    "documents longer than a bin",
    "documents without tokens",
    "tokens after the first bin of a document",
)
NO_IDS = "bad: not tokenizable"
"""Bad records that "documents read" includes too, as they were read as documents."""
EXPANDED = "genomes: documents beyond one for each sequence"
"""Name of the build count of further windows and strands."""
MAX_REASONS = 10
"""Maximum number of reasons in the summary after a build."""
NOT_CHOSEN = "documents not chosen"


@dataclass(frozen=True, kw_only=True)
class Account:
    """Facts on a dataset's card, for all or the first generations."""

    held: Manifest
    stated: About
    """Licences and sources, as people state them."""
    view: View | None
    base: Manifest
    """The dataset with the tokens; for a view, the dataset below."""
    base_stated: About

    @property
    def licenses(self) -> str:
        """The licences in words."""
        return _describe_statement(self.stated.licenses, self.base_stated.licenses)

    @property
    def sources(self) -> str:
        """The sources in words."""
        return _describe_statement(self.stated.sources, self.base_stated.sources)

    @property
    def splits(self) -> str:
        """Splits that share the build counts; empty without splits."""
        return describe_splits(self.base)

    @property
    def left_out_by_build(self) -> dict[str, int]:
        return select_left_out(sum_counts(self.base))

    @property
    def other_counts(self) -> dict[str, int]:
        """Build counts that are no left-out records."""
        left_out = self.left_out_by_build
        return {name: n for name, n in sum_counts(self.base).items() if name not in left_out}

    @property
    def left_out_by_view(self) -> dict[str, int]:
        if self.view is None:
            return {}
        counts = sum_counts(self.held)
        by_packing = {name: counts[name] for name in LEFT_OUT_BY_PACKING if name in counts}
        documents = sum(n for name, n in by_packing.items() if name.startswith("documents"))
        not_chosen = self.base.documents - documents - packing.count_documents(self.held)
        return ({NOT_CHOSEN: not_chosen} if not_chosen else {}) | by_packing


def load_account(url: str, generations: int | None = None) -> Account:
    """Load the account for a dataset, or for the first generations."""
    held = _select_generations(manifest.load(url), generations)
    stated = about.load(url)
    view = parse_view(url, held)
    check_dataset(url, view)
    if view is None:
        return Account(held=held, stated=stated, view=None, base=held, base_stated=stated)
    return Account(
        held=held,
        stated=stated,
        view=view,
        base=_select_generations(manifest.load(view.url), len(held.generations)),
        base_stated=about.load(view.url),
    )


def select_left_out(counts: Mapping[str, int]) -> dict[str, int]:
    """Select the counts of left-out records; a record is in one count only."""
    return {name: count for name, count in counts.items() if name.startswith(LEFT_OUT) and count}


def count_records_read(counts: Mapping[str, int]) -> int:
    """Count the records that a build read, both kept and left out."""
    unread = (name for name in select_left_out(counts) if name.startswith(("bad: ", "empty")))
    return counts.get("documents read", 0) + sum(counts[name] for name in unread if name != NO_IDS)


def describe_counts(counts: Mapping[str, int]) -> str:
    """Describe how many records a build read, kept, and left out by reason; of sequences that
    became windows or strands, how many documents."""
    read, left_out = count_records_read(counts), select_left_out(counts)
    num_documents = read + counts.get(EXPANDED, 0)
    reasons = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    listed = [f"{count:,} {name}" for name, count in reasons[:MAX_REASONS]]
    if num_unlisted := sum(count for _, count in reasons[MAX_REASONS:]):
        listed.append(f"{num_unlisted:,} for other reasons (`tokenize inspect` lists them)")
    expanded = "" if num_documents == read else f" as {exact_count(num_documents, 'documents')}"
    words = (
        f"read {exact_count(read, 'records')}{expanded}, kept "
        f"{num_documents - sum(left_out.values()):,}"
    )
    return "; ".join([words, f"left out: {', '.join(listed)}"] if listed else [words])


def describe_splits(held: Manifest) -> str:
    """List all splits that share a dataset's build; empty for a build without splits.

    Counts cover the whole build, because a left-out record belongs to no split.
    """
    names = [name for name, _ in held.settings.get("splits", ())]
    return f"{', '.join(['train', *names[:-1]])} and {names[-1]} together" if names else ""


def sum_counts(held: Manifest) -> dict[str, int]:
    """Sum the build counts over all generations, by name."""
    counts: Counter[str] = Counter()
    for generation in held.generations:
        counts.update(generation.provenance.get("counts", {}))
    return {name: count for name, count in sorted(counts.items()) if count}


def _select_generations(held: Manifest, generations: int | None) -> Manifest:
    return replace(held, generations=held.generations[:generations])


def _describe_statement(stated: Sequence[str], base_stated: Sequence[str]) -> str:
    if stated:
        return "; ".join(stated)
    return f"{'; '.join(base_stated)} (as its dataset states)" if base_stated else "not stated"
