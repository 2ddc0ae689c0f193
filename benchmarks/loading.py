"""Loading a mixture, beside a loop that slices the same tokens out of memory-mapped files.

    python -m benchmarks.loading            prints two lines for each sequence length

The raw loop knows where every row lies: it takes the slices, makes them int64, stacks them and
hands over a tensor. Ours also computes the order, finds the documents, masks and weighs, and
(where said) hashes each row for the ledger. Two workers are compared with none that do the same.
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

SEQ_LENS, STEP_TOKENS, STEPS, ROUNDS = (2048, 4096, 8192), 1 << 15, 600, 5
SIZES = {"web": 14e6, "code": 5e6, "math": 3e6}


def write_datasets(folder: Path) -> None:
    """Documents of about 1,000 tokens."""
    rng = np.random.default_rng(0)
    for number, (name, tokens) in enumerate(SIZES.items()):
        lengths = rng.geometric(1 / 1000, int(tokens / 1000)) + 1
        ids = rng.integers(1, 512, int(lengths.sum())).astype(np.uint16)
        ids[np.cumsum(lengths) - 1] = 0
        documents = np.split(ids, np.cumsum(lengths)[:-1])
        write_dataset(str(folder / name), documents, shard_documents=4000 + number)


def make_plan(folder: Path, seq_len: int) -> Plan:
    """A .7/.2/.1 mixture, of which every chunk is touched in the first half."""
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


def raw_loop(plan: Plan) -> Callable[[], None]:
    """The limit: the slices of the second half of the plan, located beforehand."""
    rows, seq_len = plan.phases[0].batch_rows, plan.phases[0].seq_len
    reader = RowReader(plan)
    located = reader.stream.locate(np.arange(STEPS * rows, 2 * STEPS * rows))
    slices: list[list[npt.NDArray[np.uint16]]] = []
    for source, token in zip(located.sources.tolist(), located.tokens.tolist(), strict=True):
        dataset = reader.dataset(source)
        pieces, end = [], token + seq_len + 1
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
        for first in range(0, len(slices), rows):
            stacked = [
                pieces[0].astype(np.int64)
                if len(pieces) == 1
                else np.concatenate(pieces).astype(np.int64)
                for pieces in slices[first : first + rows]
            ]
            batch = torch.from_numpy(np.stack(stacked))
            batch[:, :-1], batch[:, 1:]

    return run


def rates(plan: Plan, *, workers: int = 0, digests: bool = False) -> tuple[float, float]:
    """Tokens a second while every chunk is touched for the first time, and afterwards."""
    rows = plan.phases[0].batch_rows
    iterator = iter(Loader(plan, micro_batch=rows, workers=workers, digests=digests))
    next(iterator)

    def half(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            next(iterator)
        return steps * STEP_TOKENS / (time.perf_counter() - started)

    return half(STEPS - 1), half(STEPS)


def rate(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return STEPS * STEP_TOKENS / (time.perf_counter() - started)


def measure(plan: Plan) -> None:
    limit = raw_loop(plan)
    rate(limit)
    figures: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        first, after = rates(plan)
        measured = {
            "raw": rate(limit),
            "first": first,
            "plain": after,
            "workers": rates(plan, workers=2)[1],
            "hashed": rates(plan, digests=True)[1],
            "hashed by workers": rates(plan, workers=2, digests=True)[1],
        }
        for name, value in measured.items():
            figures.setdefault(name, []).append(value)
    found = {name: median(values) for name, values in figures.items()}
    raw, plain, hashed = found["raw"], found["plain"], found["hashed"]
    rows, seq_len = plan.phases[0].batch_rows, plan.phases[0].seq_len
    print(
        f"loading {rows} x {seq_len:,}: {plain / raw:.2f} of a raw memory-mapped loop "
        f"({plain / 1e6:.0f} of {raw / 1e6:.0f} Mtok/s); with row digests {hashed / raw:.2f}; "
        f"first touch, hashing chunks, {found['first'] / raw:.2f}"
    )
    print(
        f"loading {rows} x {seq_len:,}: 2 workers {found['workers'] / plain:.2f} of none; "
        f"with row digests {found['hashed by workers'] / hashed:.2f} of none",
        flush=True,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_datasets(Path(folder))
        for seq_len in SEQ_LENS:
            measure(make_plan(Path(folder), seq_len))


if __name__ == "__main__":
    main()
