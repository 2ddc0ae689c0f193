"""Loading a mixture, compared with a loop that slices the same tokens from memory-mapped files;
finding the rows of many sources, compared with those of one; packed rows and views, compared with
rows of the same documents laid side by side.

    python -m benchmarks.loading            prints two lines per sequence length, and six more

The raw loop knows the location of every row: it slices np.memmaps, converts the slices to int64,
stacks them, and returns inputs and targets as tensors. The benchmark checks that they equal the
loader's. The loader also computes the order, finds the documents, masks targets, sets loss
weights, and (if stated) hashes each row for the ledger. The loops alternate, a few steps each; the
figures compare CPU seconds. A second, bare loop slices plain arrays over the maps instead of
np.memmaps, whose slices cost a Python call each. Two workers are compared with none by wall time.

Rows are found 2,048 at a time, as the loader does it, in plans of sources whose sizes differ by a
factor of up to 1,000. The first call of a process is counted apart. A view has the three quarters
of the documents that are longer than 300 tokens. All figures are medians of turns.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.data.plan_data import write_head
from support.data.small_data import plan_of, write_dataset

from headrace.dataplane.datasets.dataset import ShardSpans
from headrace.dataplane.loader import gather
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.loader.rows import RowReader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import BATCH_ROWS, Stream
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.views.pack import PackConfig, pack
from headrace.tokenize.views.select import SelectConfig, select

SEQ_LENS, STEP_TOKENS, STEPS, ROUNDS = (256, 2048, 4096, 8192, 32768), 1 << 15, 600, 5
TURN = 60
"""Steps of one loop before the next loop runs."""
SIZES = {"web": 14e6, "code": 5e6, "math": 3e6}
SHARDS = {"8 MB": 4000, "256 KiB": 130}
"""Documents of a shard, by its size."""
SOURCES = (1, 20, 200, 2_000)
CALLS = 40
ONE = ExecutorConfig(workers=1)


def write_datasets(folder: Path) -> None:
    """Write datasets of documents of about 1,000 tokens."""
    rng = np.random.default_rng(0)
    for number, (name, tokens) in enumerate(SIZES.items()):
        documents = random_documents(rng, tokens)
        write_dataset(str(folder / name), documents, shard_documents=4000 + number)


def random_documents(rng: np.random.Generator, tokens: float) -> list[npt.NDArray[np.uint16]]:
    lengths = rng.geometric(1 / 1000, int(tokens / 1000)) + 1
    ids = rng.integers(1, 512, int(lengths.sum())).astype(np.uint16)
    ids[np.cumsum(lengths) - 1] = 0
    return np.split(ids, np.cumsum(lengths)[:-1])


def make_plan(folder: Path, seq_len: int) -> Plan:
    """Return a plan of a .7/.2/.1 mixture whose first half reads every chunk."""
    return plan_of(
        {
            "sources": {name: {"data": str(folder / name), "max_epochs": 9} for name in SIZES},
            "phases": {
                "all": {
                    "tokens": 2 * STEPS * STEP_TOKENS,
                    "seq_len": seq_len,
                    "batch": STEP_TOKENS,
                    "weights": dict(zip(SIZES, (0.7, 0.2, 0.1), strict=True)),
                }
            },
        }
    )


Batch = tuple[torch.Tensor, torch.Tensor]
Pieces = list[npt.NDArray[np.uint16]]


def raw_loop(plan: Plan, *, bare: bool = False) -> Iterator[Batch]:
    """The limit: repeat the steps of the second half of the plan, at precomputed locations."""
    rows, seq_len = plan.phases[0].batch_rows, plan.phases[0].seq_len
    reader = RowReader(plan)
    located = reader.stream.locate(np.arange(STEPS * rows, 2 * STEPS * rows))
    slices: list[Pieces] = []
    maps: dict[Path, np.memmap[Any, Any]] = {}
    for source, token in zip(located.sources.tolist(), located.tokens.tolist(), strict=True):
        dataset = reader.dataset(source)
        pieces, end = [], token + seq_len + 1
        while token < end:
            number = int(np.searchsorted(dataset.shard_tokens, token, side="right")) - 1
            shard, first = dataset.open_shard(number), int(dataset.shard_tokens[number])
            last = min(end - first, shard.shard.tokens)
            path = Path(dataset.url, shard.shard.name)
            if path not in maps:
                maps[path] = np.memmap(path, np.uint8, "r")
            at = [np.array([place]) for place in (0, token - first, last)]
            spans = ShardSpans(number, first, *at)
            table = gather.cut_pieces(shard, spans, shifts=np.zeros(1, np.int64), shard_id=0)
            for start, count in zip(table.token_bytes, table.counts, strict=True):
                piece = maps[path][start : start + 2 * count].view(np.uint16)
                pieces.append(np.asarray(piece) if bare else piece)
            token = first + last
        slices.append(pieces)
    while True:
        for first in range(0, len(slices), rows):
            stacked = [
                pieces[0].astype(np.int64)
                if len(pieces) == 1
                else np.concatenate(pieces).astype(np.int64)
                for pieces in slices[first : first + rows]
            ]
            batch = torch.from_numpy(np.stack(stacked))
            yield batch[:, :-1], batch[:, 1:]


def loader(plan: Plan, *, workers: int = 0, digests: bool = False) -> Iterator[Batch]:
    """Yield every step of the plan as one micro-batch."""
    rows = plan.phases[0].batch_rows
    for (batch,) in Loader(plan, micro_batch=rows, workers=workers, digests=digests):
        yield batch.tokens, batch.targets


def seconds(steps: Iterator[Batch], count: int, clock: Callable[[], float]) -> float:
    """Return the seconds per step."""
    started = clock()
    for _ in range(count):
        next(steps)
    return (clock() - started) / count


def compare(plan: Plan) -> dict[str, float]:
    """Return the CPU seconds per step of each loop: the median of its turns."""
    loops = {"raw": raw_loop(plan), "bare": raw_loop(plan, bare=True)}
    ours = {"plain": loader(plan), "hashed": loader(plan, digests=True)}
    taken = {"first": [seconds(ours["plain"], STEPS, time.process_time)]}
    seconds(ours["hashed"], STEPS, time.process_time)
    for mine, raw in zip(next(ours["plain"]), next(loops["raw"]), strict=True):
        assert torch.equal(mine, raw), "the loops read different tokens"
    loops |= ours
    for _ in range(STEPS // TURN - 1):
        for name, steps in loops.items():
            taken.setdefault(name, []).append(seconds(steps, TURN, time.process_time))
    return {name: median(values) for name, values in taken.items()}


def workers(plan: Plan, *, digests: bool) -> float:
    """Return the rate with two workers over the rate without."""
    ratios = []
    for _ in range(ROUNDS):
        pair = []
        for number in (0, 2):
            steps = loader(plan, workers=number, digests=digests)
            seconds(steps, STEPS, time.perf_counter)
            pair.append(seconds(steps, STEPS, time.perf_counter))
        ratios.append(pair[0] / pair[1])
    return median(ratios)


def measure(plan: Plan) -> None:
    taken = compare(plan)
    raw, plain = taken["raw"], taken["plain"]
    rows, seq_len = plan.phases[0].batch_rows, plan.phases[0].seq_len
    print(
        f"loading {rows} x {seq_len:,}: {raw / plain:.2f} of a raw memory-mapped loop "
        f"({STEP_TOKENS / plain / 1e6:.0f} of {STEP_TOKENS / raw / 1e6:.0f} Mtok/CPU s), "
        f"{taken['bare'] / plain:.2f} of a bare one; with row digests {raw / taken['hashed']:.2f}; "
        f"first touch, hashing chunks, {raw / taken['first']:.2f}"
    )
    print(
        f"loading {rows} x {seq_len:,}: 2 workers {workers(plan, digests=False):.2f} of none; "
        f"with row digests {workers(plan, digests=True):.2f} of none",
        flush=True,
    )


def find_rows(folder: Path) -> None:
    """Print the rows that are found in a second of the CPU, for numbers of sources."""
    rates = {}
    for count in SOURCES:
        stream = Stream(plan_of_sources(folder, count))
        spent = []
        for rows in np.arange(BATCH_ROWS * (CALLS + 1)).reshape(-1, BATCH_ROWS):
            start = time.process_time()
            stream.locate(rows)
            spent.append(time.process_time() - start)
        rates[count] = BATCH_ROWS / median(spent[1:])
        print(
            f"finding rows of {count:,} sources: {rates[count] / 1e3:,.0f}K rows/CPU s, "
            f"{rates[count] / rates[SOURCES[0]]:.2f} of those of one; "
            f"first call {1e3 * spent[0]:.0f} ms",
            flush=True,
        )


def plan_of_sources(folder: Path, count: int) -> Plan:
    rng = np.random.default_rng(0)
    sizes = 10 ** rng.uniform(8, 11, count)
    units = rng.multinomial(100_000 - count, sizes / sizes.sum()) + 1
    sources = {
        f"s{number}": {"data": write_head(f"{folder}/{count}-{number}", size), "max_epochs": 1_000}
        for number, size in enumerate(sizes.astype(int).tolist())
    }
    weights = dict(zip(sources, (units / 100_000).tolist(), strict=True))
    phase = {"tokens": 10**12, "seq_len": 2048, "batch": 1 << 21, "weights": weights}
    return plan_of({"sources": sources, "phases": {"all": phase}})


def compare_views(folder: Path) -> None:
    """Print the rates of packed rows and of a view, over that of their dataset."""
    seq_len = 2048
    for size, documents in SHARDS.items():
        url = str(folder / f"shards-{documents}")
        rng = np.random.default_rng(1)
        write_dataset(url, random_documents(rng, 6e6), shard_documents=documents)
        pack(PackConfig(dataset=url, out=f"{url}-packed", length=seq_len, engine=ONE))
        select(SelectConfig(dataset=url, out=f"{url}-view", where="tokens > 300", engine=ONE))
        loops = {name: loader(whole_plan(url + name, seq_len)) for name in ("", "-packed", "-view")}
        taken: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(1 + STEPS // TURN):
            for name, steps in loops.items():
                taken[name].append(seconds(steps, 4 * TURN, time.process_time))
        plain, packed, view = (median(turns[1:]) for turns in taken.values())
        print(
            f"loading {STEP_TOKENS // seq_len} x {seq_len:,}, shards of {size}: packed rows at "
            f"{plain / packed:.2f} of concatenated ones ({STEP_TOKENS / packed / 1e6:.0f} of "
            f"{STEP_TOKENS / plain / 1e6:.0f} Mtok/CPU s), a view at {plain / view:.2f}",
            flush=True,
        )


def whole_plan(url: str, seq_len: int) -> Plan:
    """Return a plan of one source that is long enough for all turns."""
    phase = {
        "tokens": 8 * STEPS * STEP_TOKENS,
        "seq_len": seq_len,
        "batch": STEP_TOKENS,
        "weights": {"one": 1},
    }
    source = {"data": url, "max_epochs": 1_000}
    return plan_of({"sources": {"one": source}, "phases": {"all": phase}})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        find_rows(Path(folder))
        compare_views(Path(folder))
        write_datasets(Path(folder))
        for seq_len in SEQ_LENS:
            measure(make_plan(Path(folder), seq_len))


if __name__ == "__main__":
    main()
