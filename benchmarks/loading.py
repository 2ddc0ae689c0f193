"""Loading a mixture, beside a loop that slices the same tokens out of memory-mapped files.

    python -m benchmarks.loading            prints one line for each way of loading

The raw loop knows where every row lies: it takes the slices, makes them int64, stacks them and
hands over a tensor. Ours also computes the order, finds the documents, masks and weighs, and
(where said) hashes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from small_data import plan_of, write_dataset

from headrace.dataplane.loader import Loader
from headrace.dataplane.plan import Plan
from headrace.dataplane.rows import RowReader

SEQ_LEN, ROWS, STEPS, ROUNDS = 4096, 8, 600, 7


def make_plan(folder: Path) -> Plan:
    """A .7/.2/.1 mixture of documents of about 1,000 tokens."""
    rng = np.random.default_rng(0)
    for number, (name, tokens) in enumerate((("web", 14e6), ("code", 5e6), ("math", 3e6))):
        lengths = rng.geometric(1 / 1000, int(tokens / 1000)) + 1
        ids = rng.integers(1, 512, int(lengths.sum())).astype(np.uint16)
        ids[np.cumsum(lengths) - 1] = 0
        documents = np.split(ids, np.cumsum(lengths)[:-1])
        write_dataset(str(folder / name), documents, shard_documents=4000 + number)
    return plan_of(
        {
            "sources": {
                name: {"data": str(folder / name), "max_epochs": 9}
                for name in ("web", "code", "math")
            },
            "phases": {
                "all": {
                    "tokens": 2 * STEPS * ROWS * SEQ_LEN,
                    "seq_len": SEQ_LEN,
                    "batch": ROWS * SEQ_LEN,
                    "weights": {"web": 0.7, "code": 0.2, "math": 0.1},
                }
            },
        }
    )


def raw_loop(plan: Plan) -> Callable[[], None]:
    """The limit: the same slices of the same files, located beforehand."""
    reader = RowReader(plan)
    located = reader.stream.locate(np.arange(STEPS * ROWS, 2 * STEPS * ROWS))
    slices: list[list[npt.NDArray[np.uint16]]] = []
    for source, token in zip(located.sources.tolist(), located.tokens.tolist(), strict=True):
        dataset = reader.dataset(source)
        pieces, end = [], token + SEQ_LEN + 1
        while token < end:
            number = int(np.searchsorted(dataset.shard_tokens, token, side="right")) - 1
            shard, first = dataset.open_shard(number), int(dataset.shard_tokens[number])
            last = min(end - first, shard.shard.tokens)
            data = np.memmap(Path(dataset.url, shard.shard.name), np.uint8, "r")
            for start, stop in shard.byte_ranges(token - first, last):
                pieces.append(data[start:stop].view(np.uint16))
            token = first + last
        slices.append(pieces)

    def run() -> None:
        for first in range(0, len(slices), ROWS):
            rows = [
                pieces[0].astype(np.int64)
                if len(pieces) == 1
                else np.concatenate(pieces).astype(np.int64)
                for pieces in slices[first : first + ROWS]
            ]
            batch = torch.from_numpy(np.stack(rows))
            batch[:, :-1], batch[:, 1:]

    return run


def rates(plan: Plan, *, workers: int = 0, digests: bool = False) -> tuple[float, float]:
    """Tokens a second while every chunk is touched for the first time, and afterwards."""
    iterator = iter(Loader(plan, micro_batch=ROWS, workers=workers, digests=digests))
    next(iterator)

    def half(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            next(iterator)
        return steps * ROWS * SEQ_LEN / (time.perf_counter() - started)

    return half(STEPS - 1), half(STEPS)


def rate(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return STEPS * ROWS * SEQ_LEN / (time.perf_counter() - started)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder))
        limit = raw_loop(plan)
        rate(limit)
        figures: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            first, after = rates(plan)
            measured = {
                "raw": rate(limit),
                "first": first,
                "plain": after,
                "hashed": rates(plan, digests=True)[1],
                "workers": rates(plan, workers=2)[1],
            }
            for name, value in measured.items():
                figures.setdefault(name, []).append(value)
        best = {name: median(values) for name, values in figures.items()}
        print(
            f"loading: {best['plain'] / best['raw']:.2f} of a raw memory-mapped loop "
            f"({best['plain'] / 1e6:.0f} of {best['raw'] / 1e6:.0f} Mtok/s); "
            f"with row digests {best['hashed'] / best['raw']:.2f}; "
            f"2 workers {best['workers'] / best['plain']:.2f} of none; "
            f"first touch, hashing chunks, {best['first'] / best['raw']:.2f}"
        )


if __name__ == "__main__":
    main()
