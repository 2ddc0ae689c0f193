"""Training rows from a real S3 server, beside litdata, mosaicml-streaming and raw GETs.

OpenStack Swift with its s3api runs on this machine (tests/support/stores/swift.py). The corpus is
200 MB of tokens in rows of 2,048, shuffled, written by each library in its own format. Each pass
runs in a process of its own, first with no cache (cold), then with the cache that this has left
(warm); the systems take turns, and figures are medians of the rounds. CPU seconds are those of the
process and its workers, from the end of the imports to the end of the pass. headrace verifies the
hashes of all chunks, gives targets and weights as well, and also runs with a digest of each row;
the others hash nothing. Libraries that are not installed are left out, and so is a pass of a peer
that fails.

Then a phase is read with a bounded cache: the bytes fetched over the bytes of the rows, and over
those of the chunks that the rows lie in; the requests; and the cache's largest size.

    python -m benchmarks.long.object_storage [FOLDER]      keeps the server's programs in FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.data.small_data import plan_of, write_dataset
from support.stores.swift import Swift, install

from benchmarks.long._store_readers import BUCKET, READERS, ROWS, SEQ_LEN
from headrace.dataplane.arrays import Tokens
from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.datasets.chunks import CHUNK_BYTES
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.loader.rows import RowReader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.storage import remote, storage

TOKENS, ROUNDS = 100_000_000, 12
SLOW = {("litdata", 2): 3, ("mosaicml-streaming", 0): 1, ("mosaicml-streaming", 2): 1}
"""Rounds of passes that take long: a reader and its workers."""
URL = f"s3://{BUCKET}/headrace"
LONG_ROW, LONG_BATCH, BOUND = 4096, 32, 80 << 20
"""Rows of the phase that is read with a bounded cache, and the bound."""
NEEDED = {
    "litdata": "litdata",
    "mosaicml-streaming": "streaming",
    "raw GETs, obstore": "obstore",
    "raw GETs, boto3": "boto3",
}
"""The modules of readers that headrace does not need."""
WORKERS = (0, 2)

Pass = tuple[str, str, int]
"""A reader, `cold` or `warm`, and its workers."""


def main(kept: str | None = None) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = Swift(install(Path(kept or folder) / "programs"), folder / "swift")
        server.start()
        stack.callback(server.stop)
        endpoint = server.environment["AWS_ENDPOINT_URL"]
        os.environ.update(server.environment, S3_ENDPOINT_URL=endpoint, AWS_ALLOW_HTTP="true")
        remote.file_system(f"s3://{BUCKET}")[0].mkdir(BUCKET)
        readers = [name for name in READERS if installed(name)]
        write_corpora(folder, readers)
        compare(folder, readers)
        read_bounded(folder)


def installed(reader: str) -> bool:
    result = reader not in NEEDED or importlib.util.find_spec(NEEDED[reader]) is not None
    if not result:
        print(f"object_storage: {NEEDED[reader]} is not installed; {reader} is left out")
    return result


# Corpora


def write_corpora(folder: Path, readers: list[str]) -> None:
    """Write the tokens in the format of each reader, and the plan."""
    ids = np.random.default_rng(0).integers(1, 512, TOKENS).astype(np.uint16)
    ids[999::1000] = 0
    write_dataset(URL, ids.reshape(-1, 1000), shard_documents=32_000)  # type: ignore[arg-type]
    shards = {f"headrace/{shard.name}": shard.size for shard in Dataset(URL).shards}
    (folder / "objects.json").write_text(json.dumps(shards))
    make_plan(SEQ_LEN, ROWS).save(folder / "plan.json")
    rows = ids[: TOKENS // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN)
    for name, write in (("litdata", write_litdata), ("mosaicml-streaming", write_mosaic)):
        if name in readers:
            write(folder / "written", rows)
            for file in (folder / "written").iterdir():
                storage.write(f"s3://{BUCKET}/{name}/{file.name}", file.read_bytes())
            shutil.rmtree(folder / "written")


def make_plan(seq_len: int, batch: int, **settings: int) -> Plan:
    """Return a plan of nearly one epoch."""
    phase = {
        "tokens": TOKENS - seq_len * batch * 2,
        "seq_len": seq_len,
        "batch": seq_len * batch,
        "weights": {"web": 1},
    }
    return plan_of({**settings, "sources": {"web": {"data": URL}}, "phases": {"all": phase}})


def write_litdata(folder: Path, rows: Tokens) -> None:
    """Write chunks of 64 MB, by litdata's own writer."""
    code = (
        "import sys, numpy, torch\n"
        "from litdata import TokensLoader\n"
        "from litdata.streaming.writer import BinaryWriter\n"
        "rows = torch.from_numpy(numpy.load(sys.argv[1]))\n"
        "writer = BinaryWriter(sys.argv[2], chunk_bytes=64_000_000, item_loader=TokensLoader())\n"
        "for number, row in enumerate(rows):\n"
        "    writer.add_item(number, row)\n"
        "writer.done()\n"
        "writer.merge(1)\n"
    )
    array = folder.with_suffix(".npy")
    np.save(array, rows)
    folder.mkdir()
    subprocess.run([sys.executable, "-c", code, array, folder], check=True, capture_output=True)
    array.unlink()


def write_mosaic(folder: Path, rows: Tokens) -> None:
    """Write MDS shards of 64 MB, by mosaicml-streaming's own writer."""
    from streaming import MDSWriter

    columns = {"tokens": f"ndarray:uint16:{SEQ_LEN}"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=64_000_000) as writer:
        for row in rows:
            writer.write({"tokens": row})


# Comparison


def compare(folder: Path, readers: list[str]) -> None:
    passes: defaultdict[Pass, list[dict[str, float]]] = defaultdict(list)
    for number in range(ROUNDS):
        for name in readers:
            for workers in (0,) if name.startswith("raw") else WORKERS:
                if number >= SLOW.get((name, workers), ROUNDS):
                    continue
                for state in ("cold",) if name.startswith("raw") else ("cold", "warm"):
                    if state == "cold":
                        for cache in ("headrace", "litdata", "mosaicml-streaming"):
                            shutil.rmtree(folder / cache, ignore_errors=True)
                    if figures := run(name, folder, workers):
                        passes[name, state, workers].append(figures)
    medians = {
        key: {name: median(item[name] for item in runs) for name in runs[0]}
        for key, runs in passes.items()
    }
    rates = {key: median["tokens"] / median["cpu"] / 1e6 for key, median in medians.items()}
    raw_name = next(name for name in readers if name.startswith("raw"))
    raw_pass = medians[raw_name, "cold", 0]["seconds"]
    for (name, state, workers), medians_of_reader in medians.items():
        line = f"{name}, {state}, {workers} workers: {rates[name, state, workers]:.1f} Mtok/CPU s"
        if not name.startswith("headrace"):
            ours = rates.get(("headrace", state, workers), rates["headrace", state, 0])
            line += f", headrace {ours / rates[name, state, workers]:.2f} times that"
        if workers and (name, state, 0) in rates:
            line += f", {rates[name, state, workers] / rates[name, state, 0]:.2f} of no workers"
        if state == "cold":
            line += f"; first batch after {medians_of_reader['first'] / raw_pass:.2f} raw passes"
        print(f"object_storage: {line}")
    print(f"object_storage: a raw pass took {raw_pass:.2f} s ({raw_name.partition(', ')[2]})")


def run(name: str, folder: Path, workers: int) -> dict[str, float] | None:
    """Run a reader in a process of its own; return its figures, or None if a peer failed."""
    command = [sys.executable, "-m", "benchmarks.long._store_readers", name]
    command += [str(folder), str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode and name.startswith(("headrace", "raw")):
        raise RuntimeError(f"{name} failed: {process.stderr[-3000:]}")
    if process.returncode:
        *_, last = process.stderr.strip().split("\n")
        print(f"object_storage: {name}, {workers} workers, failed: {last}")
        return None
    figures: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    if figures["tokens"] < 0.97 * TOKENS and not name.startswith("raw"):
        raise RuntimeError(f"{name} gave {figures['tokens']:,} of {TOKENS:,} tokens")
    return figures


# Bytes and the bound


def read_bounded(folder: Path) -> None:
    """Read nearly an epoch in windows of 32 MB, with a bounded cache."""
    plan = make_plan(LONG_ROW, LONG_BATCH, chunk=1 << 23, window=2)
    cache = Cache(folder / "bounded", max_bytes=BOUND)
    largest = 0
    for number, _ in enumerate(Loader(plan, micro_batch=LONG_BATCH, cache=cache)):
        if number % 20 == 0:
            with cache.folder.locked() as usage:
                largest = max(largest, usage.bytes)
    print(
        f"object_storage: {cache.fetched_bytes / (plan.tokens * 2):.3f}x of the bytes of the rows, "
        f"{cache.fetched_bytes / chunk_bytes(plan):.3f}x of the bytes of their chunks "
        f"({cache.fetched_bytes >> 20} MiB in {cache.requests} requests); cache at most "
        f"{largest / BOUND:.2f} of its bound"
    )


def chunk_bytes(plan: Plan) -> int:
    """Return the bytes of all chunks that rows of the plan lie in."""
    reader, chunks = RowReader(plan), set()
    for row in range(0, plan.rows, 256):
        rows = np.arange(row, min(row + 256, plan.rows))
        pieces = reader.find(reader.stream.locate(rows)).pieces
        for place, chunk in pieces.chunks(0, len(rows)):
            chunks.add((pieces.shards[place][1], chunk))
    shards = reader.dataset(0).shards
    return sum(
        min(CHUNK_BYTES, shards[number].size - chunk * CHUNK_BYTES) for number, chunk in chunks
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
