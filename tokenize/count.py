"""Count a corpus's documents and tokens, without writing anything.

A sample consists of text pieces, not documents: document lengths vary so much that a few documents
would dominate the sum. All bytes are counted; the sample estimates tokens per byte. With fewer than
MIN_PIECES pieces the estimate has no interval; with fewer than two there is no estimate.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..console.errors import InputError, MisuseError, run_all
from ..console.progress import Progress, format_bytes
from ..dataplane.arrays import Int64
from ..dataplane.tokenizers import marks
from . import executors
from .builder.build import BuildConfig, add_conversations, cut, load_tokenizer, make_job
from .builder.settings import BuildJob
from .builder.tasks import Task, TokenizeWorker
from .corpus.inputs import find_files, store_standard_input
from .corpus.read_stats import BAD, ReadStats
from .sources.format import Texts

BUCKETS = 40
"""Histogram buckets: bucket k counts documents with [2^k, 2^(k+1)) tokens."""
PIECE_CHARACTERS = 4096
"""Approximate length of a sample's text pieces."""
MIN_PIECES = 30
"""Lower bound for an error estimate: with fewer pieces, the formula underestimates the error."""


@dataclass
class Counts:
    """Sums over documents, over their pieces, and over the tokenized pieces: `b` is a tokenized
    piece's bytes, `t` its tokens, `tt` t², `tb` t·b, `bb` b²."""

    documents: int = 0
    bytes: int = 0
    pieces: int = 0
    sampled: int = 0
    t: int = 0
    b: int = 0
    tt: int = 0
    tb: int = 0
    bb: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    """Document counts by length, if their first piece was tokenized."""
    learnt: int = 0
    """Tokens in conversations that have a loss."""
    bad: int = 0
    read: int = 0
    """Bytes read from the corpus."""

    def add(self, increment: Counts) -> None:
        for name, value in vars(increment).items():
            if name == "histogram":
                self.histogram = [a + b for a, b in zip(self.histogram, value, strict=True)]
            else:
                setattr(self, name, getattr(self, name) + value)

    def measure(self, tokens: Int64, octets: Int64, text_bytes: Int64) -> None:
        """Set the sums over tokenized pieces. `text_bytes` has the document's bytes for its first
        piece, and 0 for other pieces."""
        self.sampled = len(tokens)
        self.t, self.b = int(tokens.sum()), int(octets.sum())
        self.tt, self.bb = int((tokens * tokens).sum()), int((octets * octets).sum())
        self.tb = int((tokens * octets).sum())
        is_first = text_bytes > 0
        lengths = tokens[is_first] * (text_bytes[is_first] / octets[is_first])
        buckets = np.floor(np.log2(lengths + 1)).astype(int)
        self.histogram = np.bincount(buckets, minlength=BUCKETS).tolist()

    @property
    def tokens(self) -> int:
        """Tokens, including end-of-document tokens; estimated if only a sample was tokenized."""
        if not self.b:
            return self.documents
        return round(self.t * self.bytes / self.b) + self.documents

    @property
    def error(self) -> int | None:
        """Half-width of the 95% confidence interval around `tokens`; None if the sample is too
        small."""
        n = self.sampled
        if n == self.pieces:
            return 0
        if n < MIN_PIECES:
            return None
        ratio = self.t / self.b
        spread = max(0.0, self.tt - 2 * ratio * self.tb + ratio * ratio * self.bb)
        # The usual variance of a ratio estimate, scaled by the bytes of the whole corpus: the
        # sampled pieces may be smaller than the others.
        deviation = math.sqrt(spread * n / (n - 1) * (1 - n / self.pieces)) / self.b
        return round(student_quantile(n - 1) * deviation * self.bytes)


def student_quantile(freedom: int) -> float:
    """Return the 97.5% quantile in Student's t-distribution; three digits are exact from 20 degrees
    of freedom on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class CountWorker:
    """Counts the tasks' documents and tokens."""

    job: BuildJob
    fraction: float

    def __call__(self, task: Task) -> Iterator[Counts]:
        worker = TokenizeWorker(self.job)
        stats = ReadStats()
        for file, texts in worker.reader.read(task.slices, stats):
            counts = Counts(documents=len(texts.texts), read=texts.size)
            sizes = [len(text.encode()) for text in texts.texts]
            counts.bytes = sum(sizes)
            if self.fraction >= 1:
                sampled, text_bytes = texts, sizes
                counts.pieces = len(texts.texts)
            else:
                sampled, text_bytes, counts.pieces = self._sample_pieces(file, texts, sizes)
            if sampled.texts:
                encoded, kept, rejected = worker.encode(file, sampled)
                stats.counts[f"{BAD}not tokenizable"] += len(rejected)
                counts.pieces -= len(rejected)
                if sampled is texts:
                    counts.documents -= len(rejected)
                    counts.bytes -= sum(sizes[k] for k, _ in rejected)
                octets = np.array([len(sampled.texts[k].encode()) for k in kept], np.int64)
                if self.job.masks and encoded.weights is not None:
                    counts.learnt = int(np.count_nonzero(encoded.weights != marks.MASKED_CODE))
                counts.measure(
                    np.diff(encoded.starts) - 1, octets, np.array(text_bytes, np.int64)[kept]
                )
            yield counts
        yield Counts(bad=stats.bad)

    def _sample_pieces(
        self, file: str, texts: Texts, sizes: Sequence[int]
    ) -> tuple[Texts, list[int], int]:
        """Sample pieces; return them, the text's bytes for first pieces (0 for others), and the
        count of all pieces. The choice depends on a piece's place, not its content: equal pieces
        must be chosen independently."""
        pieces: list[str] = []
        positions: list[int] = []
        text_bytes: list[int] = []
        count = 0
        for text, position, size in zip(texts.texts, texts.positions, sizes, strict=True):
            for number, piece in enumerate(cut_pieces(text)):
                count += 1
                piece_place = f"{file}\0{position}\0{number}".encode()
                digest = hashlib.blake2b(piece_place, digest_size=8, key=b"sample").digest()
                if int.from_bytes(digest, "little") < self.fraction * 2**64:
                    pieces.append(piece)
                    positions.append(position)
                    text_bytes.append(0 if number else size)
        return Texts(pieces, positions), text_bytes, count


def cut_pieces(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a text before spaces into pieces with at most `size` characters; few tokens change."""
    start = 0
    while len(text) - start > size:
        end = text.rfind(" ", start + size // 2, start + size)
        end = start + size if end < 0 else end
        yield text[start:end]
        start = end
    yield text[start:]


def count(config: BuildConfig, fraction: float = 1.0) -> Counts:
    """Count a corpus as `config` would build it; tokenize only `fraction` of its text."""
    tokenizer, files = run_all(
        lambda: load_tokenizer(config), lambda: find_files(config.inputs, config.source, pipe=True)
    )
    files = store_standard_input(files, config.source)
    if config.chat is not None and fraction < 1:
        raise MisuseError(
            "--sample counts pieces of texts, and --chat has whole conversations",
            hint="count all of them, or give --chat a part of the files",
        )
    config = add_conversations(config, tokenizer, files)
    job = make_job(config, tokenizer)
    tasks = cut(files, config, job)
    total = Counts()
    with Progress("counting", total=sum(task.size for task in tasks), unit="B") as progress:
        for counts in executors.run(config.engine, CountWorker(job, fraction), tasks):
            total.add(counts)
            progress.advance(counts.read, documents=counts.documents)
    if total.sampled < 2 <= total.pieces:
        raise InputError(
            f"the sample has {total.sampled} of {total.pieces:,} pieces of text: too few for an "
            "estimate",
            hint="choose a larger fraction with --sample",
        )
    return total


def make_json_data(counts: Counts) -> dict[str, Any]:
    return {
        "documents": counts.documents,
        "bytes": counts.bytes,
        "tokens": counts.tokens,
        "tokens_error": counts.error,
        "bytes_per_token": counts.bytes / max(1, counts.tokens),
        **({"learnt_tokens": counts.learnt} if counts.learnt else {}),
        "sampled_pieces": counts.sampled,
        "sampled_documents": sum(counts.histogram),
        "bad_records": counts.bad,
        "histogram": {str(2**k): number for k, number in enumerate(counts.histogram) if number},
    }


def describe(counts: Counts) -> str:
    note = ""
    if counts.sampled < counts.pieces:
        note = " (error unknown)" if counts.error is None else f" ± {counts.error:,}"
        note += f" (from {counts.sampled:,} of {counts.pieces:,} pieces of text)"
    lines = [
        f"{counts.documents:,} document{'s' * (counts.documents != 1)}, "
        f"{format_bytes(counts.bytes)} of text",
        f"{counts.tokens:,} tokens{note}, "
        f"{counts.bytes / max(1, counts.tokens):.2f} bytes per token",
    ]
    if counts.learnt:
        share = counts.learnt / counts.tokens
        lines.append(f"{counts.learnt:,} tokens with a loss ({share:.1%})")
    if counts.bad:
        lines.append(f"{counts.bad:,} bad records left out")
    max_count = max(counts.histogram)
    for k, number in enumerate(counts.histogram):
        if number:
            bar = "█" * max(1, round(40 * number / max_count))
            lines.append(f"{2**k:>10,} tokens or more  {number:>12,}  {bar}")
    return "\n".join(lines)
