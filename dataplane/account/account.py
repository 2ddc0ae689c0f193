"""The account of a dataset: its licences and sources, and the documents that were left out.

The tokens of a view are those of another dataset. So the account of a view is that of this dataset,
with the documents that the view left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
    def left_out_by_build(self) -> dict[str, int]:
        return {
            name: count for name, count in counts_of(self.base).items() if name.startswith(LEFT_OUT)
        }

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
