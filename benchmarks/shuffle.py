"""Shuffle quality of the hierarchical order, and the cost of a window: one line per chunking.

A corpus in crawl order changes slowly. The benchmark models it as a signal over the tokens of a
source that is correlated over about 4M tokens (a crawl file, a book series). Rows are served in the
order of a plan. The figures are the correlation of the signal between rows served `distance` apart,
and the spread of the mean of 1,024-row batches over that of independent rows. A full permutation
shows the level of chance. The last columns are the bytes of a window in the cache (uint16), and the
excess bytes fetched because shuffled chunks do not align with hashed ones.

    python -m benchmarks.shuffle
"""

from __future__ import annotations

import numpy as np

from headrace.dataplane.datasets.chunks import CHUNK_BYTES
from headrace.dataplane.order.epochs.permutation import derive_key, permute
from headrace.dataplane.order.source_order import Draws, Position, SourceOrder

TOKENS, SEQ_LEN, RESEMBLE = 8_000_000_000, 4096, 4_000_000
DISTANCES = (1, 64, 4096)
BATCH = 1024
CHUNKINGS = ((20, 8), (20, 64), (20, 256), (22, 32), (23, 8), (23, 16), (23, 32), (23, 64), (25, 8))


def signal() -> np.ndarray:
    """Return one value per row in storage order: a stationary series, correlated over RESEMBLE
    tokens."""
    rows = TOKENS // SEQ_LEN
    keep = np.exp(-SEQ_LEN / RESEMBLE)
    noise = np.random.default_rng(0).normal(size=rows) * np.sqrt(1 - keep**2)
    values = np.empty(rows)
    value = 0.0
    for row, step in enumerate(noise.tolist()):
        value = keep * value + step
        values[row] = value
    return (values - values.mean()) / values.std()


def report(name: str, served: np.ndarray, cost: str) -> None:
    correlations = [np.mean(served[:-distance] * served[distance:]) for distance in DISTANCES]
    means = served[: len(served) // BATCH * BATCH].reshape(-1, BATCH).mean(axis=1)
    spread = means.std() * np.sqrt(BATCH)
    text = ", ".join(
        f"{value:.3f} at {distance:,}"
        for value, distance in zip(correlations, DISTANCES, strict=True)
    )
    print(f"shuffle {name}: correlation {text}; batch spread {spread:.1f}x of independent{cost}")


def main() -> None:
    values = signal()
    report("none (storage order)", values, "")
    everything = permute(derive_key("full"), len(values), np.arange(len(values)))
    report("full permutation", values[everything], "")
    for bits, window in CHUNKINGS:
        chunk = 1 << bits
        order = SourceOrder(seed=1, name="web", tokens=TOKENS, chunk=chunk, window=window)
        rows = np.arange(order.end_row(0, SEQ_LEN))
        draws = Draws([order], [Position()], SEQ_LEN)
        _, tokens, _ = draws.locate(np.zeros_like(rows), rows)
        cost = (
            f"; window {chunk * window * 2 >> 20:,} MiB, at most "
            f"{CHUNK_BYTES / (chunk * 2):.1%} fetched twice"
        )
        report(f"chunks of {chunk >> 20}M, windows of {window}", values[tokens // SEQ_LEN], cost)


if __name__ == "__main__":
    main()
