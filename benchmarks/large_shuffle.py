"""The shuffle of a large build: what its two passes cost, and a simulation of 15T tokens.

The first lines build a small corpus with both shuffles, count the requests to the spills and the
bytes read, and compare them with the figures of `Shuffle`. The other lines are its figures for 15T
tokens, with D bytes of tokens and memory M:

    spills = ranges of buckets = D / (M / 4)      objects = spills + D / 64 MiB of shards
    reads of pass 2 = 2 × spills × ranges         bytes of a piece = D / (spills × ranges)
    bytes of tokens moved = 3 × D: spill written, spill read, shard written

Bandwidth and rate are those of all workers together. Reading the corpus (60 TB) adds 1.7 hours at
10 GB/s; tokenizing and the origins of documents are not counted. A file for each task and bucket
would be spills × ranges objects. The shuffle by shard would read a piece of 3.6M spills, of 16 MiB
of the corpus each, for each of 65,536 shards.

    python -m benchmarks.large_shuffle
"""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from headrace.dataplane.datasets import manifest
from headrace.dataplane.storage import storage
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.executors import ExecutorConfig

GI, MI = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Shuffle:
    """Figures of a shuffle through buckets."""

    tokens: float
    width: int
    """Bytes of a token."""
    memory: int
    """`--shuffle-memory`."""
    shard: int = 64 * MI

    @property
    def bytes(self) -> float:
        return self.tokens * self.width

    @property
    def spills(self) -> float:
        return self.bytes / (self.memory / 4)

    @property
    def shards(self) -> float:
        return self.bytes / self.shard

    @property
    def reads(self) -> float:
        """Requests of the second pass: two for each spill and range of buckets."""
        return 2 * self.spills**2

    def hours(self, bandwidth: float) -> float:
        """Hours of reading and writing tokens: spill written, spill read, shard written."""
        return 3 * self.bytes / bandwidth / 3600

    def request_hours(self, rate: float) -> float:
        return self.reads / rate / 3600


def small_build(folder: Path, memory: int | None) -> tuple[int, int, int, int]:
    """Build; return the requests to spills, the bytes read, those of tokens, and the spills."""
    requests: list[tuple[str, int]] = []
    read = storage.read

    def counting(url: str, start: int = 0, end: int | None = None) -> bytes:
        data = read(url, start, end)
        if "/spills/" in url:
            requests.append((url, len(data)))
        return data

    out = folder / f"out-{memory}"
    options: dict[str, Any] = {"shard_size": MI, "slice_size": MI, "shuffle_memory": memory}
    config = BuildConfig(
        inputs=(str(folder / "corpus"),),
        out=str(out),
        tokenizer="byte",
        shuffle=1,
        engine=ExecutorConfig(workers=1),
        **options,
    )
    with mock.patch.object(storage, "read", counting):
        build(config)
    tokens = 2 * manifest.load(str(out)).tokens
    spills = {url for url, _ in requests if not url.endswith(".keys")}
    return len(requests), sum(size for _, size in requests), tokens, len(spills)


def measure() -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 9))) for _ in range(3000)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        with (folder / "corpus" / "a.jsonl").open("w") as out:
            for _ in range(9000):
                text = " ".join(rng.choices(words, k=rng.randint(10, 600)))
                out.write(json.dumps({"text": text}) + "\n")
        for memory in (None, 16 * MI):
            requests, size, tokens, spills = small_build(folder, memory)
            line = (
                f"shuffle {'by shard' if memory is None else 'through buckets'}: {spills} spills, "
                f"{requests:,} requests, {size / tokens:.2f} of the tokens' bytes read"
            )
            if memory is not None:
                planned = Shuffle(tokens / 2, 2, memory, MI)
                buckets = -(-tokens // (memory // 4))
                line += f"; {requests / (2 * spills * buckets):.2f} of 2 × spills × buckets"
                line += f", {requests / planned.reads:.2f} of the simulation"
            print(line)


def main() -> None:
    measure()
    for width in (2, 4):
        for memory in (4, 16, 64):
            plan = Shuffle(15e12, width, memory * GI)
            print(
                f"15T tokens of {width} bytes, {memory} GiB a worker: {plan.bytes / 1e12:.0f} TB, "
                f"{plan.spills:,.0f} spills, {plan.shards:,.0f} shards, {plan.reads / 1e6:,.1f}M "
                f"reads of {plan.bytes / plan.spills**2 / 1e3:,.0f} kB, "
                f"{plan.request_hours(5000):.1f} h at 5,000 requests/s, "
                f"{plan.hours(10e9):.1f} h at 10 GB/s"
            )


if __name__ == "__main__":
    main()
