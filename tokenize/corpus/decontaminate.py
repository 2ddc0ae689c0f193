"""Drop documents that share an n-gram with an evaluation, or cut the n-grams out.

A cut removes the n-gram and MARGIN characters on both sides, as for GPT-3. Remaining pieces of
fewer than MIN_PIECE characters are dropped, and so are documents with MAX_CUTS cuts or more.
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
from .evaluations import EvaluationConfig, Evaluations, EvaluationSummary
from .ngrams import ENTRY, Hit, Ngrams
from .read_stats import MAX_MESSAGES, ReadStats
from .words import word_spans

ContaminationAction = Literal["drop", "cut"]

MARGIN = 200
MIN_PIECE = 200
MAX_CUTS = 10

DROPPED_COUNT = "dropped by decontamination"
CUT_COUNT = "documents cut by decontamination"
PIECE_COUNT = "pieces of cut documents"
CONTAMINATED_BY = "contaminated by "
"""Count names, or their prefix; manifests store them."""


@dataclass(frozen=True, kw_only=True)
class StoredEvaluations:
    """Evaluations in a build's work folder, and the action on documents that share n-grams."""

    config: EvaluationConfig
    action: ContaminationAction
    digest: str
    read: tuple[EvaluationSummary, ...]
    url: str
    entries: str
    """File name of the n-grams."""
    lengths: tuple[int, ...]
    """N-gram lengths, in words."""

    @staticmethod
    def write(
        evaluations: Evaluations, action: ContaminationAction, url: str, folder: str
    ) -> StoredEvaluations:
        return StoredEvaluations(
            config=evaluations.config,
            action=action,
            digest=evaluations.digest,
            read=evaluations.read,
            url=url,
            entries=write_named(url, folder, "ngrams", evaluations.ngrams.entries.tobytes()),
            lengths=evaluations.ngrams.lengths,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Return everything that decides which documents stay; names of files do not."""
        settings = asdict(self.config)
        del settings["evaluations"]
        cut = {"margin": MARGIN, "shortest": MIN_PIECE, "most_cuts": MAX_CUTS}
        action = {"cut": cut} if self.action == "cut" else {}
        return {"evaluations": self.digest, **settings, "action": self.action, **action}

    @cached_property
    def ngrams(self) -> Ngrams:
        return Ngrams(map_named(self.url, self.entries).view(ENTRY), self.lengths)

    def apply(self, file: File, texts: Texts, stats: ReadStats) -> Texts:
        """Drop or cut contaminated documents, and count them; return the rest."""
        hits = self.ngrams.find(texts.texts)
        if not hits:
            return texts
        hits_by_text = {
            text: list(group) for text, group in groupby(hits, key=lambda hit: hit.text)
        }
        piece_texts: list[int] = []
        pieces: list[str] = []
        for k, text in enumerate(texts.texts):
            kept_pieces = [text]
            if k in hits_by_text:
                self._count(file, texts, hits_by_text[k], stats)
                kept_pieces = cut(text, hits_by_text[k]) if self.action == "cut" else []
                stats.counts[CUT_COUNT if kept_pieces else DROPPED_COUNT] += 1
                stats.counts[PIECE_COUNT] += len(kept_pieces)
            piece_texts += [k] * len(kept_pieces)
            pieces += kept_pieces
        return replace(texts.select(piece_texts), texts=pieces)

    def _count(self, file: File, texts: Texts, hits: Sequence[Hit], stats: ReadStats) -> None:
        """Count a contaminated document under its evaluations; note where the first ones are."""
        for number in {hit.evaluation for hit in hits}:
            stats.counts[CONTAMINATED_BY + self.read[number].name] += 1
        if len(stats.notes) < MAX_MESSAGES:
            hit, text = hits[0], texts.texts[hits[0].text]
            word_places = word_spans(text)[hit.word : hit.word + hit.words]
            shared_words = f"{self.read[hit.evaluation].name}, record {hit.record + 1}: "
            shared_words += " ".join(text[word_places[0][0] : word_places[-1][1]].split())
            position = texts.positions[hit.text]
            stats.notes.append(str(BadRecord("contaminated", shared_words, file.name, position)))


def cut(text: str, hits: Sequence[Hit]) -> list[str]:
    """Cut n-grams out of a text; return the remaining pieces, none if the text is dropped."""
    word_places = word_spans(text)
    starts, ends = [start for start, _ in word_places], [end for _, end in word_places]
    cuts: list[tuple[int, int]] = []
    for hit in hits:
        low = starts[bisect_left(starts, starts[hit.word] - MARGIN)]
        high = ends[bisect_right(ends, ends[hit.word + hit.words - 1] + MARGIN) - 1]
        if cuts and low <= cuts[-1][1]:
            low, high = cuts[-1][0], max(high, cuts.pop()[1])
        cuts.append((low, high))
    if len(cuts) >= MAX_CUTS:
        return []
    edges = [0, *(edge for pair in cuts for edge in pair), len(text)]
    pieces = [text[low:high].strip() for low, high in zip(edges[::2], edges[1::2], strict=True)]
    return [piece for piece in pieces if len(piece) >= MIN_PIECE]
