"""Count what a corpus holds, without writing anything."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..console.errors import InputError
from ..console.progress import Progress, as_bytes
from . import engines
from .build import BuildConfig, cut, job_of, load_tokenizer
from .inputs import find
from .job import Job
from .records import Record
from .sources import Texts
from .tasks import BuildTask, Task

BUCKETS = 40
"""Of the histogram: documents of [2^k, 2^(k+1)) tokens."""


@dataclass
class Counts:
    """Sums over documents; `t` and `b` are the tokens and bytes of the tokenized ones."""

    documents: int = 0
    bytes: int = 0
    sampled: int = 0
    t: int = 0
    b: int = 0
    tt: int = 0
    tb: int = 0
    bb: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    bad: int = 0
    read: int = 0
    """Bytes of the corpus that were read."""

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            if name == "histogram":
                self.histogram = [a + b for a, b in zip(self.histogram, value, strict=True)]
            else:
                setattr(self, name, getattr(self, name) + value)

    @property
    def tokens(self) -> int:
        """With the ends of documents; estimated from the bytes, where only a sample was counted."""
        if not self.b:
            return self.documents
        return round(self.t * self.bytes / self.b) + self.documents

    @property
    def error(self) -> int:
        """Half the width of the interval that holds the true count 95 times in 100."""
        n = self.sampled
        if n == self.documents or n < 2:
            return 0
        ratio = self.t / self.b
        spread = self.tt - 2 * ratio * self.tb + ratio * ratio * self.bb
        deviation = math.sqrt(max(0.0, spread) / (n * (n - 1)) * (1 - n / self.documents))
        return round(1.96 * deviation * self.documents)


@dataclass(frozen=True)
class CountTask:
    job: Job
    share: float

    def __call__(self, task: Task) -> Iterator[Counts]:
        runner = BuildTask(self.job)
        record = Record({})
        for _, texts in runner.texts(task, record):
            found = Counts(documents=len(texts.texts), read=texts.size)
            sizes = [len(text.encode()) for text in texts.texts]
            found.bytes = sum(sizes)
            chosen = [k for k, text in enumerate(texts.texts) if self._chosen(text)]
            if chosen:
                self._tokenize(runner, texts, sizes, chosen, found)
            yield found
        yield Counts(bad=sum(n for name, n in record.counts.items() if name.startswith("bad")))

    def _chosen(self, text: str) -> bool:
        if self.share >= 1:
            return True
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=b"sample").digest()
        return int.from_bytes(digest, "little") < self.share * 2**64

    def _tokenize(
        self,
        runner: BuildTask,
        texts: Texts,
        sizes: Sequence[int],
        chosen: Sequence[int],
        found: Counts,
    ) -> None:
        starts = runner.tokenizer.encode([texts.texts[k] for k in chosen]).starts
        tokens = np.diff(starts) - 1
        octets = np.array([sizes[k] for k in chosen], np.int64)
        found.sampled = len(chosen)
        found.t, found.b = int(tokens.sum()), int(octets.sum())
        found.tt, found.bb = int((tokens * tokens).sum()), int((octets * octets).sum())
        found.tb = int((tokens * octets).sum())
        buckets = np.floor(np.log2(tokens + 1)).astype(int)
        found.histogram = np.bincount(buckets, minlength=BUCKETS).tolist()


def count(config: BuildConfig, share: float = 1.0) -> Counts:
    """Count a corpus as `config` would build it; tokenize only a `share` of its documents."""
    job = job_of(config, load_tokenizer(config))
    tasks = cut(find(config.inputs, config.source, fingerprints=False), config, job)
    total = Counts()
    label = "counting"
    with Progress(label, total=sum(task.size for task in tasks), unit="B") as progress:
        for found in engines.run(config.engine, CountTask(job, share), tasks):
            total.add(found)
            progress.advance(found.read, documents=found.documents)
    if total.sampled < 2 <= total.documents:
        raise InputError(
            f"the sample holds {total.sampled} of {total.documents:,} documents: too few to "
            "estimate from",
            mend="take a larger share with --sample",
        )
    return total


def as_data(counts: Counts) -> dict[str, Any]:
    return {
        "documents": counts.documents,
        "bytes": counts.bytes,
        "tokens": counts.tokens,
        "tokens_error": counts.error,
        "bytes_per_token": counts.bytes / max(1, counts.tokens),
        "sampled_documents": counts.sampled,
        "bad_records": counts.bad,
        "histogram": {str(2**k): number for k, number in enumerate(counts.histogram) if number},
    }


def describe(counts: Counts) -> str:
    about = f" ± {counts.error:,} (from {counts.sampled:,} documents)" if counts.error else ""
    lines = [
        f"{counts.documents:,} documents, {as_bytes(counts.bytes)} of text",
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
