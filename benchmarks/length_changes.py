"""Tokens of an epoch that changes of the sequence length lose, and the cost of serving them.

A source is read for a little more than an epoch, in phases of 4,096, 8,192, 16,384 and 32,768
tokens: three changes. A line for each size of the source: the share of the epoch that is never
served, the rows of several spans, and the time to locate the first of them after a restart.

Then many sources reach the end of their epoch together: the time to locate a row in order and at
random, beside the same mixture without changes of length, and the bytes of the remainders that the
process keeps.

    python -m benchmarks.length_changes
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.data.plan_data import write_head

from headrace.dataplane.arrays import Int64
from headrace.dataplane.order.epochs.tokens import REMAINDERS, REMAINDERS_BYTES
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.mixtures.mixture_file.mixture import Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.view.summary import summarize

SIZES = (3_000_000, 30_000_000, 300_000_000, 10_000_000_000)
PHASES = ((4_096, 0.21), (8_192, 0.23), (16_384, 0.19), (32_768, 0.45))
"""Tokens of a row, and the part of an epoch."""


def plan_of(url: str, tokens: int) -> Plan:
    source = SourceSpec(data=url, max_epochs=2)
    phases = {
        f"p{number}": PhaseSpec(
            tokens=int(part * tokens), seq_len=length, batch=length, weights={"web": 1}
        )
        for number, (length, part) in enumerate(PHASES)
    }
    return resolve(Mixture(sources={"web": source}, phases=phases))


def many_sources(folder: str, count: int) -> None:
    """Locate the rows of the last window of each source."""
    tokens, share = 300_000_000, dict.fromkeys([f"s{number}" for number in range(count)], 1 / count)
    sources = {
        name: SourceSpec(data=write_head(f"{folder}/{name}", tokens), max_epochs=2)
        for name in share
    }
    costs = {}
    for lengths in ((4_096, 8_192, 16_384), (16_384, 16_384, 16_384)):
        phases = {
            f"p{number}": PhaseSpec(
                tokens=int(part * tokens * count), seq_len=length, batch=length, weights=share
            )
            for number, (length, part) in enumerate(zip(lengths, (0.4, 0.3, 0.28), strict=True))
        }
        stream = Stream(resolve(Mixture(sources=sources, phases=phases)))
        last = stream.plan.end_row
        stream.locate(np.arange(last - 20 * count, last - 10 * count))  # each source's first use
        ordered = np.arange(last - 10 * count, last)
        for name, rows in (
            ("in order", ordered),
            ("at random", np.random.default_rng(0).permutation(ordered)),
        ):
            costs[lengths, name] = located(stream, rows[:2048])
    changed, unchanged = (
        [cost for (lengths, _), cost in costs.items() if (len(set(lengths)) > 1) == changes]
        for changes in (True, False)
    )
    kept = REMAINDERS_BYTES - REMAINDERS.budget
    print(
        f"the end of an epoch of {count:,} sources: {changed[0]:.0f} us of CPU for a row in order "
        f"({changed[0] / unchanged[0]:.1f} times as without changes of length), {changed[1]:.0f} "
        f"at random ({changed[1] / unchanged[1]:.1f} times); {len(REMAINDERS):,} remainders kept, "
        f"{kept / 2**20:.1f} MiB of {REMAINDERS_BYTES >> 20}",
        flush=True,
    )


def located(stream: Stream, rows: Int64) -> float:
    """Return the microseconds of CPU time to locate a row, 64 rows at once."""
    start = time.process_time()
    for first in range(0, len(rows), 64):
        stream.locate(rows[first : first + 64])
    return 1e6 * (time.process_time() - start) / len(rows)


def lost(plan: Plan) -> int:
    """Return the tokens of the first epoch that are in no row."""
    use = summarize(Stream(plan)).total[0]
    assert 1 < use.stands_at < 2, "one epoch has ended"
    return use.left_over


def report(folder: str, tokens: int) -> None:
    plan = plan_of(write_head(f"{folder}/{tokens}", tokens), tokens)
    missing = lost(plan)
    located = Stream(plan).locate(np.arange(plan.phases[-1].first_row, plan.end_row))
    row = int(located.rows[min(located.pieces)])
    start = time.process_time()
    Stream(plan).locate(np.array([row]))
    seconds = time.process_time() - start
    print(
        f"length changes, {tokens:>14,} tokens: {missing:,} are lost ({missing / tokens:.4%}, "
        f"{missing / plan.phases[-1].seq_len:.2f} rows); {len(located.pieces):,} of {plan.rows:,} "
        f"rows have several spans; the first after a restart: {1000 * seconds:.1f} ms"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for tokens in SIZES:
            report(folder, tokens)
        for count in (200, 2_000):
            many_sources(folder, count)


if __name__ == "__main__":
    main()
