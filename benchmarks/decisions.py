"""Time of a run's decisions about shares, beside a plan without any.

    python -m benchmarks.decisions

A run of 10 million rows of ten sources decides its shares every 9,000 rows. CPU time is measured:
to open the order, to locate rows anywhere, and to make the next decision, with the limits that
`max_epochs` sets and the check that all sources last.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.data.plan_data import write_head

from headrace.dataplane.order.plan import Decision, Plan
from headrace.dataplane.order.stream import Stream
from headrace.mixtures.mixture_file.mixture import Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.steering.limits import find_limits

SOURCES, ROWS, EVERY, LENGTH = 10, 10_000_000, 9_000, 4096
COUNTS = (10, 100, 1000)
SOUGHT = 200


def draw_weights(rng: random.Random) -> tuple[int, ...]:
    weights = [rng.randint(1, 100) for _ in range(SOURCES)]
    units = [weight * 1_000_000 // sum(weights) for weight in weights]
    units[0] += 1_000_000 - sum(units)
    return tuple(units)


def plan_of(folder: str) -> Plan:
    sources = {
        f"s{number}": SourceSpec(data=write_head(f"{folder}/s{number}", 10**11), max_epochs=2)
        for number in range(SOURCES)
    }
    phase = PhaseSpec(
        tokens=ROWS * LENGTH,
        seq_len=LENGTH,
        batch=1000 * LENGTH,
        weights=dict.fromkeys(sources, 0.1),
    )
    return resolve(Mixture(sources=sources, phases={"main": phase}))


def decide(plan: Plan, count: int) -> Plan:
    """Return the plan with decisions that say how many rows came before them."""
    rng, stream = random.Random(1), Stream(plan)
    for number in range(1, count + 1):
        row = number * EVERY
        before = tuple(stream.counts(row).tolist())
        decision = Decision(
            row=row, weights=draw_weights(rng), digest=f"{number:032x}", before=before
        )
        stream = stream.steer(replace(stream.plan, decisions=(*stream.plan.decisions, decision)))
    return stream.plan


def cpu_ms(act: Callable[[], object]) -> float:
    start = time.process_time()
    act()
    return 1000 * (time.process_time() - start)


def seek(stream: Stream) -> None:
    for row in np.random.default_rng(0).integers(0, ROWS, SOUGHT):
        stream.locate(np.array([row]))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(folder)
        planned = cpu_ms(lambda: seek(Stream(plan))) / SOUGHT
        print(f"decisions, none: a row anywhere {planned:.2f} ms")
        for count in COUNTS:
            steered = decide(plan, count)
            opened = cpu_ms(lambda steered=steered: Stream(steered).counts(ROWS))
            stream = Stream(steered)
            row_ms = cpu_ms(lambda stream=stream: seek(stream)) / SOUGHT
            row = (count + 1) * EVERY
            next_ms = cpu_ms(lambda stream=stream, row=row: find_limits(stream, row))
            decision = Decision(row=row, weights=steered.decisions[0].weights, digest="f" * 32)
            later = replace(steered, decisions=(*steered.decisions, decision))
            next_ms += cpu_ms(
                lambda stream=stream, later=later: list(stream.steer(later).shortages())
            )
            print(
                f"decisions, {count:>5,}: the order opens in {opened:.0f} ms; a row anywhere "
                f"{row_ms:.2f} ms, {row_ms / planned:.1f} times as long; the next decision "
                f"{next_ms:.0f} ms"
            )


if __name__ == "__main__":
    main()
