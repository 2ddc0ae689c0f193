"""Count what a corpus holds, without writing anything.

A sample is of pieces of text, not of documents: documents differ so much in length that a few of
them decide the sum, and whether they were chosen. All bytes are counted; the sample tells how many
tokens a byte has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..console.errors import InputError
from ..console.progress import Progress, as_bytes
from ..dataplane.arrays import Int64
from . import executors as engines
from .build.build import BuildConfig, cut, job_of, load_tokenizer
from .build.settings import BuildJob
from .build.task_state import Record
from .build.tasks import BuildTask, Task
from .corpus.inputs import find
from .sources import Texts

BUCKETS = 40
"""Of the histogram: documents of [2^k, 2^(k+1)) tokens."""
PIECE = 4096
"""Characters of what a sample chooses: documents are cut into pieces of about so many."""
ENOUGH = 30
"""Pieces from which an error can be told: of fewer, the formula says too little."""


@dataclass
class Counts:
    """Sums over documents, over their pieces, and over the pieces that were tokenized, whose bytes
    and tokens are `b` and `t`."""

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
    """Of the documents whose first piece was tokenized."""
    bad: int = 0
    read: int = 0
    """Bytes of the corpus that were read."""

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            if name == "histogram":
                self.histogram = [a + b for a, b in zip(self.histogram, value, strict=True)]
            else:
                setattr(self, name, getattr(self, name) + value)

    def measure(self, tokens: Int64, octets: Int64, whole: Int64) -> None:
        """Note the tokens and bytes of pieces; `whole` holds, for those with which a document
        begins, the document's bytes, and 0 for the others."""
        self.sampled = len(tokens)
        self.t, self.b = int(tokens.sum()), int(octets.sum())
        self.tt, self.bb = int((tokens * tokens).sum()), int((octets * octets).sum())
        self.tb = int((tokens * octets).sum())
        first = whole > 0
        lengths = tokens[first] * (whole[first] / octets[first])
        buckets = np.floor(np.log2(lengths + 1)).astype(int)
        self.histogram = np.bincount(buckets, minlength=BUCKETS).tolist()

    @property
    def tokens(self) -> int:
        """With the ends of documents; estimated from the bytes, where only a sample was counted."""
        if not self.b:
            return self.documents
        return round(self.t * self.bytes / self.b) + self.documents

    @property
    def error(self) -> int | None:
        """Half the width of the interval that holds the true count 95 times in 100; None where
        the sample is too small to tell."""
        n = self.sampled
        if n == self.pieces:
            return 0
        if n < ENOUGH:
            return None
        ratio = self.t / self.b
        spread = max(0.0, self.tt - 2 * ratio * self.tb + ratio * ratio * self.bb)
        # The usual variance of a ratio, in terms of the whole: pieces that were chosen may be
        # smaller than the others.
        deviation = math.sqrt(spread * n / (n - 1) * (1 - n / self.pieces)) / self.b
        return round(student(n - 1) * deviation * self.bytes)


def student(freedom: int) -> float:
    """The 97.5 % point of Student's distribution, to three digits from 20 degrees of freedom on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class CountTask:
    job: BuildJob
    share: float

    def __call__(self, task: Task) -> Iterator[Counts]:
        runner = BuildTask(self.job)
        record = Record({})
        for file, texts in runner.reader.read(task.slices, record):
            found = Counts(documents=len(texts.texts), read=texts.size)
            sizes = [len(text.encode()) for text in texts.texts]
            found.bytes = sum(sizes)
            if self.share >= 1:
                chosen, whole = texts, sizes
                found.pieces = len(texts.texts)
            else:
                chosen, whole, found.pieces = self._choose(file, texts, sizes)
            if chosen.texts:
                encoded, kept, bad = runner.encode(file, chosen)
                record.counts["bad: not tokenizable"] += len(bad)
                found.pieces -= len(bad)
                if chosen is texts:
                    found.documents -= len(bad)
                    found.bytes -= sum(sizes[k] for k, _ in bad)
                octets = np.array([len(chosen.texts[k].encode()) for k in kept], np.int64)
                found.measure(np.diff(encoded.starts) - 1, octets, np.array(whole, np.int64)[kept])
            yield found
        yield Counts(bad=record.bad)

    def _choose(
        self, file: str, texts: Texts, sizes: Sequence[int]
    ) -> tuple[Texts, list[int], int]:
        """Some pieces of the texts; for those with which a text begins, its bytes, else 0; and how
        many pieces there are. They are chosen by where they stand: what they say may stand in many
        places."""
        chosen: list[str] = []
        positions: list[int] = []
        whole: list[int] = []
        count = 0
        for text, position, size in zip(texts.texts, texts.positions, sizes, strict=True):
            for number, piece in enumerate(pieces_of(text)):
                count += 1
                place = f"{file}\0{position}\0{number}".encode()
                digest = hashlib.blake2b(place, digest_size=8, key=b"sample").digest()
                if int.from_bytes(digest, "little") < self.share * 2**64:
                    chosen.append(piece)
                    positions.append(position)
                    whole.append(0 if number else size)
        return Texts(chosen, positions), whole, count


def pieces_of(text: str) -> Iterator[str]:
    """A text cut into pieces, before spaces: there few tokens notice it."""
    start = 0
    while len(text) - start > PIECE:
        end = text.rfind(" ", start + PIECE // 2, start + PIECE)
        end = start + PIECE if end < 0 else end
        yield text[start:end]
        start = end
    yield text[start:]


def count(config: BuildConfig, share: float = 1.0) -> Counts:
    """Count a corpus as `config` would build it; tokenize only a `share` of its text."""
    job = job_of(config, load_tokenizer(config))
    tasks = cut(find(config.inputs, config.source), config, job)
    total = Counts()
    with Progress("counting", total=sum(task.size for task in tasks), unit="B") as progress:
        for found in engines.run(config.engine, CountTask(job, share), tasks):
            total.add(found)
            progress.advance(found.read, documents=found.documents)
    if total.sampled < 2 <= total.pieces:
        raise InputError(
            f"the sample holds {total.sampled} of {total.pieces:,} pieces of text: too few to "
            "estimate from",
            hint="take a larger share with --sample",
        )
    return total


def as_data(counts: Counts) -> dict[str, Any]:
    return {
        "documents": counts.documents,
        "bytes": counts.bytes,
        "tokens": counts.tokens,
        "tokens_error": counts.error,
        "bytes_per_token": counts.bytes / max(1, counts.tokens),
        "sampled_pieces": counts.sampled,
        "sampled_documents": sum(counts.histogram),
        "bad_records": counts.bad,
        "histogram": {str(2**k): number for k, number in enumerate(counts.histogram) if number},
    }


def describe(counts: Counts) -> str:
    about = ""
    if counts.sampled < counts.pieces:
        error = "by an error that so few do not tell" if counts.error is None else ""
        about = f" ± {counts.error:,}" if not error else f" {error}"
        about += f" (from {counts.sampled:,} of {counts.pieces:,} pieces of text)"
    lines = [
        f"{counts.documents:,} document{'s' * (counts.documents != 1)}, "
        f"{as_bytes(counts.bytes)} of text",
        f"{counts.tokens:,} tokens{about}, "
        f"{counts.bytes / max(1, counts.tokens):.2f} bytes for each",
    ]
    if counts.bad:
        lines.append(f"{counts.bad:,} bad records were left out")
    most = max(counts.histogram)
    for k, number in enumerate(counts.histogram):
        if number:
            bar = "█" * max(1, round(40 * number / most))
            lines.append(f"{2**k:>10,} tokens and more  {number:>12,}  {bar}")
    return "\n".join(lines)
