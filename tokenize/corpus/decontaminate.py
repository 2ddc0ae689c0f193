"""Leave out documents that have an n-gram of an evaluation, or cut the n-grams out.

A cut takes the n-gram and MARGIN characters on both sides out of a document, as for GPT-3. What is
left are pieces: those of fewer than SHORTEST characters are left out, and so are documents that
would be cut at MOST_CUTS places or more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

from ...dataplane.storage.verified import map_named, write_named
from ..files.input_file import File
from ..sources.format import BadRecord, Texts
from .evaluations import Evaluation, EvaluationConfig, Evaluations
from .ngrams import ENTRY, Hit, Ngrams
from .read_stats import MAX_MESSAGES, ReadStats
from .words import spans

Action = Literal["drop", "cut"]

MARGIN = 200
SHORTEST = 200
MOST_CUTS = 10

LEFT_OUT = "dropped by decontamination"
CUT = "documents cut by decontamination"
PIECES = "pieces of cut documents"
FOUND = "contaminated by "
"""Names of counts, or their beginning; manifests store them."""


@dataclass(frozen=True, kw_only=True)
class StoredEvaluations:
    """Evaluations in the work folder of a build, and what happens to documents that have their
    n-grams."""

    config: EvaluationConfig
    action: Action
    digest: str
    read: tuple[Evaluation, ...]
    url: str
    entries: str
    """File of the n-grams."""
    lengths: tuple[int, ...]
    """Numbers of their words."""

    @staticmethod
    def write(held: Evaluations, action: Action, url: str, folder: str) -> StoredEvaluations:
        return StoredEvaluations(
            config=held.config,
            action=action,
            digest=held.digest,
            read=held.read,
            url=url,
            entries=write_named(url, folder, "ngrams", held.ngrams.entries.tobytes()),
            lengths=held.ngrams.lengths,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Return what decides the documents that stay. Names of files do not."""
        settings = asdict(self.config)
        del settings["evaluations"]
        cut = {"margin": MARGIN, "shortest": SHORTEST, "most_cuts": MOST_CUTS}
        action = {"cut": cut} if self.action == "cut" else {}
        return {"evaluations": self.digest, **settings, "action": self.action, **action}

    @cached_property
    def ngrams(self) -> Ngrams:
        return Ngrams(map_named(self.url, self.entries).view(ENTRY), self.lengths)

    def apply(self, file: File, texts: Texts, stats: ReadStats) -> Texts:
        """Return the documents without n-grams of evaluations; count the others."""
        hits = self.ngrams.find(texts.texts)
        if not hits:
            return texts
        found = {text: list(group) for text, group in groupby(hits, key=lambda hit: hit.text)}
        owners: list[int] = []
        pieces: list[str] = []
        for k, text in enumerate(texts.texts):
            parts = [text]
            if k in found:
                self._count(file, texts, found[k], stats)
                parts = cut(text, found[k]) if self.action == "cut" else []
                stats.counts[CUT if parts else LEFT_OUT] += 1
                stats.counts[PIECES] += len(parts)
            owners += [k] * len(parts)
            pieces += parts
        return replace(texts.select(owners), texts=pieces)

    def _count(self, file: File, texts: Texts, hits: Sequence[Hit], stats: ReadStats) -> None:
        """Count a document for each evaluation; note the places of the first documents."""
        for number in {hit.evaluation for hit in hits}:
            stats.counts[FOUND + self.read[number].name] += 1
        if len(stats.notes) < MAX_MESSAGES:
            hit, text = hits[0], texts.texts[hits[0].text]
            words = spans(text)[hit.word : hit.word + hit.words]
            what = f"{self.read[hit.evaluation].name}, record {hit.record + 1}: "
            what += " ".join(text[words[0][0] : words[-1][1]].split())
            position = texts.positions[hit.text]
            stats.notes.append(str(BadRecord("contaminated", what, file.name, position)))


def cut(text: str, hits: Sequence[Hit]) -> list[str]:
    """Return the pieces of a text between n-grams that are cut out; none if it is left out."""
    words = spans(text)
    starts, ends = [start for start, _ in words], [end for _, end in words]
    cuts: list[tuple[int, int]] = []
    for hit in hits:
        low = starts[bisect_left(starts, starts[hit.word] - MARGIN)]
        high = ends[bisect_right(ends, ends[hit.word + hit.words - 1] + MARGIN) - 1]
        if cuts and low <= cuts[-1][1]:
            low, high = cuts[-1][0], max(high, cuts.pop()[1])
        cuts.append((low, high))
    if len(cuts) >= MOST_CUTS:
        return []
    edges = [0, *(edge for pair in cuts for edge in pair), len(text)]
    pieces = [text[low:high].strip() for low, high in zip(edges[::2], edges[1::2], strict=True)]
    return [piece for piece in pieces if len(piece) >= SHORTEST]
