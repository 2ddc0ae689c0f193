"""How well the hierarchical order shuffles, and what a window costs: one line for each grain.

A corpus in the order in which it was crawled changes slowly: here a signal over the tokens of a
source whose neighbours resemble each other over about 4M tokens (a crawl file, a book series). Rows
are served in the order of a plan; the figure is the correlation of the signal between rows that
are served `distance` apart, and the spread of a 1,024-row batch's mean over what independent rows
would give. A full permutation shows what is left by chance. The last columns are what a window
keeps in the cache (uint16), and what cutting chunks out of hashed ones fetches too much.

    python -m benchmarks.shuffle
"""

from __future__ import annotations

import numpy as np

from headrace.dataplane.datasets.chunks import CHUNK_BYTES
from headrace.dataplane.order.permutation import key, permute
from headrace.dataplane.order.source_order import Position, SourceOrder

TOKENS, SEQ_LEN, RESEMBLE = 8_000_000_000, 4096, 4_000_000
DISTANCES = (1, 64, 4096)
BATCH = 1024
GRAINS = ((20, 8), (20, 64), (20, 256), (22, 32), (23, 8), (23, 16), (23, 32), (23, 64), (25, 8))


def signal() -> np.ndarray:
    """One value a row, in storage order: a stationary series that forgets over RESEMBLE tokens."""
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
    everything = permute(key("full"), len(values), np.arange(len(values)))
    report("full permutation", values[everything], "")
    for bits, window in GRAINS:
        chunk = 1 << bits
        order = SourceOrder(seed=1, name="web", tokens=TOKENS, chunk=chunk, window=window)
        rows = np.arange(order.rows(0, SEQ_LEN))
        _, tokens = order.offsets(Position(), SEQ_LEN, rows)
        cost = (
            f"; window {chunk * window * 2 >> 20:,} MiB, at most "
            f"{CHUNK_BYTES / (chunk * 2):.1%} fetched twice"
        )
        report(f"chunks of {chunk >> 20}M, windows of {window}", values[tokens // SEQ_LEN], cost)


if __name__ == "__main__":
    main()
