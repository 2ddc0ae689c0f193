"""Training rows from a real S3 server, compared with a raw parallel GET of the same bytes.

OpenStack Swift with its s3api runs on this machine (tests/swift.py installs it). A phase is read
with a cold, bounded cache. The figures are the bytes fetched over the bytes of the rows, and over
those of the chunks that the rows lie in; the requests; the cache's largest size; and the tokens per
second, compared with sixteen threads that only GET the objects, 8 MiB at a time. The first batch is
timed in a new process that has imported only torch. Server and reader share the machine's cores.

    python -m benchmarks.long.object_storage
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from small_data import plan_of, write_dataset
from swift import Swift, install

from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.datasets.chunks import CHUNK_BYTES
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.loader.rows import RowReader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.storage import remote, storage

TOKENS, SEQ_LEN, BATCH_ROWS = 160_000_000, 4096, 32
BOUND = 128 << 20
FIRST_BATCH_SECONDS = 2.0
FIRST_BATCH = f"""
import sys, time
import torch
started = time.perf_counter()
from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.order.plan import Plan
plan, cache = Plan.load(sys.argv[1]), Cache(sys.argv[2], max_bytes={BOUND})
next(iter(Loader(plan, micro_batch={BATCH_ROWS}, cache=cache)))
print(time.perf_counter() - started)
"""


def make_plan(url: str) -> Plan:
    """Return a plan over 320 MB of tokens: objects of 64 MB, windows of 32 MB, nearly one epoch."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 512, TOKENS).astype(np.uint16)
    ids[999::1000] = 0
    write_dataset(url, ids.reshape(-1, 1000), shard_documents=32_000)  # type: ignore[arg-type]
    return plan_of(
        {
            "chunk": 1 << 23,
            "window": 2,
            "sources": {"web": {"data": url}},
            "phases": {
                "all": {
                    "tokens": TOKENS - SEQ_LEN * BATCH_ROWS * 2,
                    "seq_len": SEQ_LEN,
                    "batch": SEQ_LEN * BATCH_ROWS,
                    "weights": {"web": 1},
                }
            },
        }
    )


def chunk_bytes(plan: Plan) -> int:
    """Return the bytes of all chunks that rows of the plan lie in."""
    reader = RowReader(plan)
    dataset = reader.dataset(0)
    chunks = set()
    for row in range(0, plan.rows, 256):
        located = reader.stream.locate(np.arange(row, min(row + 256, plan.rows)))
        for token in located.tokens.tolist():
            chunks.update(dataset.chunks(token, token + SEQ_LEN + 1))
    return sum(
        min(CHUNK_BYTES, dataset.shards[number].size - chunk * CHUNK_BYTES)
        for number, chunk in chunks
    )


def raw_rate(url: str) -> float:
    """Return the bytes per second of sixteen threads that GET the objects and discard them."""

    def ranges() -> Iterator[tuple[str, int, int]]:
        for shard in Dataset(url).shards:
            for start in range(0, shard.size, 8 << 20):
                yield storage.join(url, shard.name), start, min(start + (8 << 20), shard.size)

    started = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        size = sum(pool.map(lambda part: len(storage.read(*part)), list(ranges())))
    return size / (time.perf_counter() - started)


def first_batch_seconds(plan: Plan, folder: Path) -> float:
    plan.save(folder / "plan.json")
    command = [sys.executable, "-c", FIRST_BATCH, folder / "plan.json", folder / "first"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Swift(install(Path(folder) / "programs"), Path(folder) / "swift")
        server.start()
        try:
            os.environ.update(server.environment)
            remote.file_system("s3://bench")[0].mkdir("bench")
            measure("s3://bench/web", Path(folder))
        finally:
            server.stop()


def measure(url: str, folder: Path) -> None:
    plan = make_plan(url)
    first = first_batch_seconds(plan, folder)
    cache = Cache(folder / "cache", max_bytes=BOUND)
    largest, started = 0, time.perf_counter()
    for number, _ in enumerate(Loader(plan, micro_batch=BATCH_ROWS, cache=cache)):
        if number % 20 == 0:
            with cache.folder.locked() as usage:
                largest = max(largest, usage.bytes)
    rate = plan.tokens * 2 / (time.perf_counter() - started)
    raw = raw_rate(url)
    print(
        f"object_storage: {cache.fetched_bytes / (plan.tokens * 2):.3f}x of the bytes of the rows, "
        f"{cache.fetched_bytes / chunk_bytes(plan):.3f}x of the bytes of their chunks "
        f"({cache.fetched_bytes >> 20} MiB in {cache.requests} requests); cache at most "
        f"{largest / BOUND:.2f} of its bound"
    )
    print(
        f"object_storage: first batch after {first:.2f} s in a new process, "
        f"{first / FIRST_BATCH_SECONDS:.2f} of the limit of {FIRST_BATCH_SECONDS} s"
    )
    print(
        f"object_storage: {rate / raw:.2f} of a raw parallel GET "
        f"({rate / 1e6:.0f} of {raw / 1e6:.0f} MB/s)"
    )


if __name__ == "__main__":
    main()
