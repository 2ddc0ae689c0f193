"""Readers of tokens in an S3 bucket, each run in a process of its own by object_storage.py.

    python -m benchmarks.long._store_readers READER FOLDER WORKERS

prints a JSON object: the tokens that were read, the seconds to the first batch, those of the whole
pass, and the CPU seconds of the process from the end of the imports to the end of the pass, and of
the processes that it started, to their end. What the exit of the process takes is not counted, as
the imports are not: torch takes 0.3 CPU seconds to go. FOLDER holds the reader's cache: a second
process finds it warm.
"""

from __future__ import annotations

import atexit
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SEQ_LEN, ROWS = 2048, 8
"""Rows of a batch, and tokens of a row."""
BUCKET = "bench"
RANGE, THREADS = 8 << 20, 16
"""Bytes of each GET of the raw readers, and GETs at a time."""

Batches = Iterator[int]
"""The tokens of each batch."""
Reader = Callable[[Path, int], Callable[[], Batches]]


def headrace(folder: Path, workers: int, *, digests: bool = False) -> Callable[[], Batches]:
    """Read a plan; each chunk of the shards is hashed, and with `digests` each row as well."""
    import torch  # noqa: F401 (a training script has imported it)

    from headrace.dataplane.datasets.cache import Cache
    from headrace.dataplane.loader.loader import Loader
    from headrace.dataplane.order.plan import Plan

    def batches() -> Batches:
        cache = Cache(folder / "headrace")
        plan = Plan.load(folder / "plan.json")
        loader = Loader(plan, micro_batch=ROWS, cache=cache, workers=workers, digests=digests)
        for step in loader:
            for batch in step:
                yield batch.tokens.numel()

    return batches


def headrace_digests(folder: Path, workers: int) -> Callable[[], Batches]:
    return headrace(folder, workers, digests=True)


def litdata(folder: Path, workers: int) -> Callable[[], Batches]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # the server has no certificate

    def batches() -> Batches:
        dataset = StreamingDataset(
            f"s3://{BUCKET}/litdata",
            cache_dir=str(folder / "litdata"),
            item_loader=TokensLoader(block_size=SEQ_LEN),
            shuffle=True,
            drop_last=True,
        )
        for batch in StreamingDataLoader(dataset, batch_size=ROWS, num_workers=workers):
            yield batch.numel()

    return batches


def mosaicml_streaming(folder: Path, workers: int) -> Callable[[], Batches]:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    def batches() -> Batches:
        dataset = StreamingDataset(
            remote=f"s3://{BUCKET}/mosaicml-streaming",
            local=str(folder / "mosaicml-streaming"),
            shuffle=True,
            batch_size=ROWS,
            num_canonical_nodes=1,
        )
        for batch in DataLoader(dataset, batch_size=ROWS, num_workers=workers):
            yield batch["tokens"].numel()

    return batches


Get = Callable[[str, int, int], bytes]


def raw(get: Get, objects: dict[str, int]) -> Batches:
    """GET the objects by ranges, and discard them; each range is a batch."""

    def size(part: tuple[str, int, int]) -> int:
        return len(get(*part)) // 2

    ranges = [
        (key, start, min(start + RANGE, size))
        for key, size in objects.items()
        for start in range(0, size, RANGE)
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(size, ranges)


def raw_obstore(folder: Path, workers: int) -> Callable[[], Batches]:
    from obstore.store import S3Store

    objects = json.loads((folder / "objects.json").read_text())

    def batches() -> Batches:
        store: Any = S3Store(BUCKET)
        return raw(lambda key, start, end: store.get_range(key, start=start, end=end), objects)

    return batches


def raw_boto3(folder: Path, workers: int) -> Callable[[], Batches]:
    import boto3

    objects = json.loads((folder / "objects.json").read_text())

    def batches() -> Batches:
        client = boto3.client("s3")

        def get(key: str, start: int, end: int) -> bytes:
            expected = f"bytes={start}-{end - 1}"
            body: bytes = client.get_object(Bucket=BUCKET, Key=key, Range=expected)["Body"].read()
            return body

        return raw(get, objects)

    return batches


READERS: dict[str, Reader] = {
    "headrace": headrace,
    "headrace with digests": headrace_digests,
    "litdata": litdata,
    "mosaicml-streaming": mosaicml_streaming,
    "raw GETs, obstore": raw_obstore,
    "raw GETs, boto3": raw_boto3,
}


def cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def main(name: str, folder: str, workers: str) -> None:
    figures = {"cpu": -cpu_seconds(resource.RUSAGE_CHILDREN)}

    def end() -> None:
        figures["cpu"] += cpu_seconds(resource.RUSAGE_CHILDREN)
        print(json.dumps(figures))

    atexit.register(end)  # it runs after the handlers of libraries, which end their processes
    begin = READERS[name](Path(folder), int(workers))
    figures["cpu"] -= cpu_seconds()
    started = time.perf_counter()
    tokens, first = 0, 0.0
    for batch in begin():
        first = first or time.perf_counter() - started
        tokens += batch
    figures["cpu"] += cpu_seconds()
    figures |= {"tokens": tokens, "first": first, "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main(*sys.argv[1:])
