"""Score variants: the log-likelihood of a window of the genome with each allele.

    genome   … flank │ REF │ flank …      reference: flank + REF + flank
    VCF      POS REF ALT                  alternative: flank + ALT + flank

The window is centred on the variant, ends at the sequence's ends, and has as many letters as the
option says with the longer allele. Both texts cover the same part of the genome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa

from ...console.progress import Progress
from ...dataplane.tokenizers import Tokenizer
from ..placement.local_rows import Ids
from ..placement.team import Team
from ..scores.likelihood import batch_by_length, restore_order
from .files.genome import Genome, reverse_complement
from .files.vcf import Allele, read_alleles
from .parts import PartWriter
from .rows import encode_texts

SCORE = "score"
"""Name of the team's function that scores a batch."""
SCHEMA = pa.schema(
    {
        "chrom": pa.string(),
        "pos": pa.int64(),
        "id": pa.string(),
        "ref": pa.string(),
        "alt": pa.string(),
        "start": pa.int64(),  # first and last position of the window, from 1 on
        "end": pa.int64(),
        "ref_score": pa.float64(),
        "alt_score": pa.float64(),
        "delta": pa.float64(),
        "ref_mean": pa.float64(),
        "alt_mean": pa.float64(),
        "delta_mean": pa.float64(),
        "skipped": pa.string(),
    }
)


@dataclass(frozen=True)
class Window:
    """Letters [start, end) of a sequence, with either allele."""

    start: int
    end: int
    ref_text: str
    alt_text: str


def cut_window(genome: Genome, allele: Allele, size: int) -> Window | str:
    """Return the window of a variant, or why it has none."""
    ref_length, alt_length = len(allele.ref), len(allele.alt)
    flanks = size - max(ref_length, alt_length)
    if flanks < 1:
        return "longer than the window"
    chrom, ref_start = allele.chrom, allele.start
    ref_end = ref_start + ref_length
    start = max(0, ref_start - flanks // 2)
    end = min(genome.sequences[chrom].length, ref_end + flanks - flanks // 2)
    before, after = genome.fetch(chrom, start, ref_start), genome.fetch(chrom, ref_end, end)
    ref = genome.fetch(chrom, ref_start, ref_end)
    # The alternative of a masked (lower-case) place is masked too.
    alt = allele.alt.lower() if ref.islower() else allele.alt.upper()
    if not before and not after and min(ref_length, alt_length) == 1:
        return "without other bases in the sequence"
    return Window(start, end, before + ref + after, before + alt + after)


@dataclass(frozen=True)
class Variants:
    """Variants to score, and how."""

    path: str
    genome: Genome
    tokenizer: Tokenizer
    window: int
    both_strands: bool
    batch_tokens: int

    def read(self) -> Iterator[tuple[Allele, Window | str]]:
        """Yield each allele with its window, or with the reason why it is skipped."""
        for allele in read_alleles(self.path, self.genome):
            yield allele, allele.skipped or cut_window(self.genome, allele, self.window)

    def survey(self) -> Survey:
        """Read all variants, so that a wrong line is an error before the first one is scored."""
        alleles = longest = 0
        skipped: Counter[str] = Counter()
        for _, window in self.read():
            alleles += 1
            if isinstance(window, str):
                skipped[window] += 1
            else:
                longest = max(longest, len(window.ref_text), len(window.alt_text))
        return Survey(alleles, dict(skipped.most_common()), longest)

    def score(self, team: Team, writer: PartWriter, alleles: int) -> None:
        """Score the alleles that no part has, on rank 0 of the team."""
        pairs = islice(self.read(), writer.first, None)
        rows_per_allele = 4 if self.both_strands else 2
        rows_per_batch = max(1, self.batch_tokens // self.window)
        count = max(1, team.round_batches(SCORE) * rows_per_batch // rows_per_allele)
        with Progress("scoring", total=alleles - writer.first, unit=" alleles") as progress:
            while chunk := list(islice(pairs, count)):
                rows = self._score_chunk(team, chunk)
                writer.add(pa.Table.from_pylist(rows, SCHEMA))
                progress.advance(len(chunk))
        writer.flush()

    def _score_chunk(
        self, team: Team, chunk: Sequence[tuple[Allele, Window | str]]
    ) -> list[dict[str, object]]:
        texts: dict[str, str] = {}
        """Names of variants by text; equal texts are scored once."""
        for allele, window in chunk:
            if isinstance(window, Window):
                name = f"the window of {allele.chrom}:{allele.position}"
                for text in (window.ref_text, window.alt_text):
                    for strand in self._strands(text):
                        texts.setdefault(strand, name)
        rows = encode_texts(self.tokenizer, list(texts), list(texts.values())) if texts else []
        scores = dict(zip(texts, self._score_rows(team, rows), strict=True))
        lengths = dict(zip(texts, map(len, rows), strict=True))
        results = []
        for allele, window in chunk:
            row: dict[str, object] = {
                "chrom": allele.chrom,
                "pos": allele.position,
                "id": allele.id,
                "ref": allele.ref,
                "alt": allele.alt,
            }
            if isinstance(window, str):
                row["skipped"] = window
            else:
                row |= {"start": window.start + 1, "end": window.end}
                row |= self._compare(window, scores, lengths)
            results.append(row)
        return results

    def _strands(self, text: str) -> tuple[str, ...]:
        return (text, reverse_complement(text)) if self.both_strands else (text,)

    def _score_rows(self, team: Team, rows: Sequence[Ids]) -> list[float]:
        batch_ids = list(batch_by_length(list(map(len, rows)), self.batch_tokens))
        batches = [[rows[row] for row in ids] for ids in batch_ids]
        results: list[list[float]] = []
        num_batches = team.round_batches(SCORE)
        for first in range(0, len(batches), num_batches):
            results += team.map_round(SCORE, batches[first : first + num_batches])
        return restore_order(batch_ids, results)

    def _compare(
        self, window: Window, scores: Mapping[str, float], lengths: Mapping[str, int]
    ) -> dict[str, float]:
        """Return the columns of scores; of two strands, their averages."""
        columns: dict[str, float] = {}
        for allele, text in (("ref", window.ref_text), ("alt", window.alt_text)):
            strands = self._strands(text)
            columns[f"{allele}_score"] = sum(scores[strand] for strand in strands) / len(strands)
            means = [scores[strand] / max(1, lengths[strand] - 1) for strand in strands]
            columns[f"{allele}_mean"] = sum(means) / len(means)
        columns["delta"] = columns["alt_score"] - columns["ref_score"]
        columns["delta_mean"] = columns["alt_mean"] - columns["ref_mean"]
        return columns


@dataclass(frozen=True)
class Survey:
    """What a VCF file holds."""

    alleles: int
    skipped: Mapping[str, int]
    """Numbers of alleles by the reason why they are not scored."""
    longest: int
    """Letters of the longest row."""
