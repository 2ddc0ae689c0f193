"""Time to combine the step statistics of all ranks, compared with pickled objects.

    python -m benchmarks.step_stats

Each rank of a run combines the messages of all ranks once a step, after the last backward pass. The
benchmark makes the messages of up to 2,048 ranks in one process, so it measures the work of a rank
without the network. The peer is the same content as one pickled object for each rank, which
`all_gather_object` would receive: it is unpickled and added up in a loop over the ranks.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from headrace.trainer.loop.metrics import combinations
from headrace.trainer.loop.step_stats import FLAGS, combine

RANKS = (8, 256, 2048)
SOURCES, ROWS = 10, 4
"""Sources of the mixture, and rows of a rank in a step."""
RUNS = 15
FLOATS = 3 * SOURCES + sum(ranks.size for ranks in (*FLAGS.values(), *combinations().values()))
"""Numbers of a rank."""


def messages(ranks: int) -> torch.Tensor:
    floats = torch.rand(ranks, FLOATS, dtype=torch.float64).view(torch.int64)
    rows = torch.arange(ranks * ROWS).view(ranks, ROWS)
    digests = torch.randint(-(1 << 62), 1 << 62, (ranks, 2 * ROWS))
    return torch.cat([floats, rows, digests], dim=1)


def pickled(stacked: torch.Tensor) -> list[bytes]:
    return [
        pickle.dumps(
            (
                message[:FLOATS].view(torch.float64).tolist(),
                message[FLOATS : FLOATS + ROWS].tolist(),
                [item.to_bytes(8, "little", signed=True) for item in message[-2 * ROWS :].tolist()],
            )
        )
        for message in stacked
    ]


def loop(objects: list[bytes]) -> tuple[list[float], list[bytes]]:
    totals = [0.0] * FLOATS
    digest_of = {}
    for pickled in objects:
        numbers, rows, digests = pickle.loads(pickled)
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        for place, row in enumerate(rows):
            digest_of[row] = digests[2 * place] + digests[2 * place + 1]
    return totals, [digest_of[row] for row in sorted(digest_of)]


def seconds(act: Callable[[], object]) -> float:
    taken = []
    for _ in range(RUNS):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return median(taken)


def main() -> None:
    torch.set_num_threads(1)
    for ranks in RANKS:
        stacked = messages(ranks)
        objects = pickled(stacked)
        expected = range(ranks * ROWS)
        ours = seconds(partial(combine, stacked, SOURCES, expected))
        peer = seconds(partial(loop, objects))
        print(
            f"step stats of {ranks:,} ranks, {SOURCES} sources, {ROWS} rows a rank: "
            f"{1000 * ours:.2f} ms, {1e6 * ours / ranks:.2f} µs a rank; "
            f"pickled objects take {1000 * peer:.2f} ms, {peer / ours:.1f} times as long"
        )


if __name__ == "__main__":
    main()
