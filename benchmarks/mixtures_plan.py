"""Time of planning, seeking and auditing, compared with its limit.

    python -m benchmarks.mixtures_plan

Planning reads the heads of manifests only, so the large datasets here are heads without shards.
Seeking is measured as a run does it after a restart: one row at a time, anywhere in the plan.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from plan_data import write_head
from small_data import write_dataset

from headrace.dataplane.order.stream import Stream
from headrace.mixtures.audit.auditor import Auditor
from headrace.mixtures.planning.open_plan import open_plan
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.spec.mixture import Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.template import template
from headrace.mixtures.view.summary import summarize
from headrace.mixtures.view.table import table

PLAN_SECONDS = 5.0
SEEK_SECONDS = 0.020
AUDIT_SECONDS = 0.100


class Times(NamedTuple):
    cpu: float
    clock: float


def timed(action: Callable[..., object], *arguments: object) -> Times:
    cpu, clock = time.process_time(), time.perf_counter()
    action(*arguments)
    return Times(time.process_time() - cpu, time.perf_counter() - clock)


def report(name: str, times: Sequence[Times], limit: float) -> None:
    """Print the slowest by CPU time; wall time depends on other processes of the machine."""
    slowest = max(times)
    print(
        f"{name}: {1e3 * slowest.cpu:.1f} ms of CPU ({1e3 * slowest.clock:.1f} ms of wall time), "
        f"{slowest.cpu / limit:.3f} of the limit of {1e3 * limit:.0f} ms",
        flush=True,
    )


def table_of(file: Path) -> str:
    target = open_plan(str(file))
    return table(summarize(target.stream, target.branch))


def many_sources(folder: Path) -> None:
    """Plan 1,000 sources of 10,000 shards each; sizes differ by a factor of up to 1,000."""
    rng = np.random.default_rng(0)
    sizes = (10 ** rng.uniform(8, 11, 1_000)).astype(int).tolist()
    urls = [
        write_head(str(folder / f"source-{number}"), size, shards=10_000)
        for number, size in enumerate(sizes)
    ]
    file = folder / "many.yaml"
    file.write_text(template(urls))
    report(
        "plan 1,000 sources x 10,000 shards, with its table", [timed(table_of, file)], PLAN_SECONDS
    )


def ten_trillion_tokens(folder: Path) -> None:
    names = [f"s{number}" for number in range(20)]
    sources = {
        name: SourceSpec(data=write_head(str(folder / name), 10**12), max_epochs=3)
        for name in names
    }
    share = dict.fromkeys(names, 0.05)
    phases = {
        "stable": PhaseSpec(tokens=7 * 10**12, seq_len=4096, batch=2**23, weights={**share}),
        "ramp": PhaseSpec(
            tokens=10**12,
            weights={
                **share,
                "s0": {"from": 0.05, "to": 0.1},
                "s1": {"from": 0.05, "to": 0},
            },
        ),
        "anneal": PhaseSpec(tokens=2 * 10**12, weights={"stable": 0.6, "s3": 0.25, "s7": 0.15}),
    }
    mixture = Mixture(sources=sources, phases=phases)
    report("plan 10T tokens with a ramp", [timed(resolve, mixture)], PLAN_SECONDS)
    stream = Stream(resolve(mixture))
    rows = np.random.default_rng(1).integers(0, stream.plan.last_row, 300)
    sought = [timed(stream.locate, rows[place : place + 1]) for place in range(len(rows))]
    report("seek a row of 10T tokens, slowest of 300", sought, SEEK_SECONDS)
    tokens = np.random.default_rng(2).integers(0, 10**12 - 5_000, 300).tolist()
    times = [timed(stream.rows_with, 3, token, token + 5_000) for token in tokens]
    report("find the rows of a document in 10T tokens, slowest of 300", times, SEEK_SECONDS)


def local_audit(folder: Path) -> None:
    """Audit a step of 64 rows of 4,096 tokens of three local datasets, opened by the audit."""
    rng = np.random.default_rng(0)
    lines = []
    for name, tokens in (("web", 14e6), ("code", 5e6), ("math", 3e6)):
        lengths = rng.geometric(1 / 1000, int(tokens / 1000)) + 1
        ids = rng.integers(1, 512, int(lengths.sum())).astype(np.uint16)
        ids[np.cumsum(lengths) - 1] = 0
        write_dataset(
            str(folder / name), np.split(ids, np.cumsum(lengths)[:-1]), shard_documents=4_000
        )
        lines.append(f"  {name}: {{data: {folder / name}}}")
    text = "\n".join(
        [
            "sources:",
            *lines,
            "phases:",
            "  all: {tokens: 16M, seq_len: 4096, batch: 256Ki,",
            "        weights: {web: 0.7, code: 0.2, math: 0.1}}",
        ]
    )
    (folder / "mixture.yaml").write_text(text)
    plan = folder / "plan.json"
    open_plan(str(folder / "mixture.yaml")).plan.save(plan)
    times = [
        timed(lambda number: Auditor(open_plan(str(plan))).step(number), step)
        for step in range(0, 50, 10)
    ]
    report("audit --step, 64 rows of 4,096 tokens, slowest of 5", times, AUDIT_SECONDS)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        many_sources(Path(folder))
        ten_trillion_tokens(Path(folder))
        local_audit(Path(folder))


if __name__ == "__main__":
    main()
