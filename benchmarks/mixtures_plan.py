"""Time of planning, seeking and auditing, compared with its limit.

    python -m benchmarks.mixtures_plan

Planning reads the heads of manifests only, so the large datasets here are heads without shards.
Seeking is measured as a run does it after a restart: one row at a time, anywhere in the plan.
A process of a run is measured as one that starts where the plan's tables are on the disk already:
its memory that is no mapped file, after it has read rows of all datasets in every phase. The
interpreter and libraries are counted apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.data.plan_data import write_head
from support.data.small_data import write_dataset

from headrace.dataplane.arrays import Int64
from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.loader.rows import RowReader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.dataplane.storage import host_files
from headrace.mixtures.audit.auditor import Auditor
from headrace.mixtures.mixture_file.mixture import Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.planning.open_plan import open_plan
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.template import render_template
from headrace.mixtures.view.summary import summarize
from headrace.mixtures.view.table import format_table

PLAN_SECONDS = 5.0
LARGE_PLAN_SECONDS = 15.0
READY_SECONDS = 1.0
PROCESS_BYTES = 60 << 20
FILE_BYTES = 2 << 30
SEEK_SECONDS = 0.020
AUDIT_SECONDS = 0.100
SOUGHT_ROWS = 200_000
"""Rows of each phase in which a process seeks a row of each source."""


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
    return format_table(summarize(target.stream, target.branch))


def many_sources(folder: Path) -> None:
    """Plan 1,000 sources of 10,000 shards each; sizes differ by a factor of up to 1,000."""
    rng = np.random.default_rng(0)
    sizes = (10 ** rng.uniform(8, 11, 1_000)).astype(int).tolist()
    urls = [
        write_head(str(folder / f"source-{number}"), size, shards=10_000)
        for number, size in enumerate(sizes)
    ]
    file = folder / "many.yaml"
    file.write_text(render_template(urls))
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
    rows = np.random.default_rng(1).integers(0, stream.plan.end_row, 300)
    sought = [timed(stream.locate, rows[place : place + 1]) for place in range(len(rows))]
    report("seek a row of 10T tokens, slowest of 300", sought, SEEK_SECONDS)
    tokens = np.random.default_rng(2).integers(0, 10**12 - 5_000, 300).tolist()
    times = [
        timed(stream.find_rows, 3, np.array([token]), np.array([token + 5_000])) for token in tokens
    ]
    report("find the rows of a document in 10T tokens, slowest of 300", times, SEEK_SECONDS)


def fifteen_trillion_tokens(datasets: list[str], decimals: int = 5) -> None:
    """Plan 15T tokens over three phases, one with changing shares and one with other rows; then
    start a process of that run. With seven decimals, its order is fair."""
    rng, count = np.random.default_rng(0), len(datasets)
    sizes = 10 ** rng.uniform(8, 11, count)
    names = [f"s{number}" for number in range(count)]
    sources = {
        name: SourceSpec(data=url, max_epochs=1_000)
        for name, url in zip(names, datasets, strict=True)
    }
    even, uneven = ({} for _ in range(2))
    whole = 10**decimals
    units = rng.multinomial(whole - count, sizes / sizes.sum()) + 1
    for name, unit in zip(names, units.tolist(), strict=True):
        even[name] = unit / whole
        uneven[name] = {"from": unit / whole, "to": 1 / count}
    phases = {
        "stable": PhaseSpec(tokens=10 * 10**12, seq_len=4096, batch=2**22, weights=even),
        "ramp": PhaseSpec(tokens=4 * 10**12, weights=uneven),
        "anneal": PhaseSpec(tokens=10**12, seq_len=8192, weights={"stable": 0.6, "ramp": 0.4}),
    }
    name = f"{count:,} sources x 10,000 shards, {decimals} decimals, 15T tokens"
    plan_and_start(name, datasets, Mixture(sources=sources, phases=phases))


def ends_of_epochs(datasets: list[str]) -> None:
    """Plan two changes of the row length; the last phase ends in the last window of every source,
    so that its process serves the remainders of all."""
    count = len(datasets)
    share = dict.fromkeys([f"s{number}" for number in range(count)], 1 / count)
    sources = {
        name: SourceSpec(data=url, max_epochs=2) for name, url in zip(share, datasets, strict=True)
    }
    tokens = manifests.load(datasets[0]).tokens * count
    phases = {
        f"p{length}": PhaseSpec(
            tokens=int(part * tokens), seq_len=length, batch=2**22, weights=share
        )
        for length, part in ((4096, 0.4), (8192, 0.3), (16384, 0.296))
    }
    name = f"{count:,} sources x 10,000 shards at the end of their epoch"
    plan_and_start(name, datasets, Mixture(sources=sources, phases=phases))


def plan_and_start(name: str, datasets: list[str], mixture: Mixture) -> None:
    report(f"plan {name}", [timed(resolve, mixture)], LARGE_PLAN_SECONDS)
    plan = Path(datasets[0]).parent / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
    resolve(mixture).save(plan)
    started = in_a_process(plan)
    assert started["datasets"] == len(datasets)
    report(f"ready, {name}", [Times(*started["ready"])], READY_SECONDS)
    tables = sum(file.stat().st_size for file in host_files.folder().glob("*"))
    report_bytes(f"memory of a process, {name}", started["bytes"], PROCESS_BYTES)
    report_bytes(f"the same with Python and its libraries, {name}", started["whole"], PROCESS_BYTES)
    report_bytes(f"all files that are mapped, {name}", tables, FILE_BYTES)


def many_shards(folder: Path, count: int) -> list[str]:
    """Write datasets of 10,000 shards of 2M tokens each; return their URLs.

    A dataset lists one file 10,000 times, and all datasets share it and their table on the disk by
    links."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 512, 2_000_000).astype(np.uint16)
    documents = np.split(ids, np.sort(rng.choice(len(ids), 2_000, replace=False)))
    model = str(folder / "model")
    manifest = write_dataset(model, documents, shard_documents=len(documents))
    (shard,) = manifests.load_table(model, manifest.generations[0])
    generation = manifests.write_generation(model, [shard] * 10_000)
    urls = [str(folder / f"{count}-{number}") for number in range(count)]
    for url in urls:
        for name in (shard.name, generation.table):
            (Path(url) / name).parent.mkdir(parents=True)
            os.link(Path(model) / name, Path(url) / name)
        # Mixtures refuse two sources of one hash.
        unique_generation = replace(generation, table_hash=hashlib.sha256(url.encode()).hexdigest())
        manifests.save(url, replace(manifest, generations=()).append(unique_generation))
    return urls


def report_bytes(name: str, octets: int, limit: int) -> None:
    print(
        f"{name}: {octets / 2**20:.1f} MiB, {octets / limit:.3f} of the limit of {limit >> 20} MiB",
        flush=True,
    )


def in_a_process(plan: Path) -> dict[str, Any]:
    """Return what a process of its own measures with a plan."""
    command = [sys.executable, __file__, str(plan)]
    measured: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    )
    return measured


def start_process(plan: str) -> None:
    """Open a plan as a worker of its run does, locate rows of every phase, and read rows of every
    dataset."""
    import pyarrow  # noqa: F401 (its libraries are no part of what the plan costs)

    before = private_bytes()
    cpu, clock = time.process_time(), time.perf_counter()
    stream = Stream(Plan.load(plan))
    stream.locate(np.array([stream.plan.first_row]))
    ready = time.process_time() - cpu, time.perf_counter() - clock
    reader = RowReader(stream.plan, stream=stream)
    for phase in stream.plan.phases:
        for block in reader.find_blocks(blocks(first_rows(stream, phase.end_row))):
            reader.read(block)
    after = private_bytes()
    measured = {"datasets": len(reader.opened), "bytes": after - before, "whole": after}
    print(json.dumps({"ready": ready, **measured}))


def first_rows(stream: Stream, last: int) -> Int64:
    """Return the first row of each source among the rows before `last`."""
    firsts: dict[int, int] = {}
    for rows in blocks(np.arange(last - SOUGHT_ROWS, last), 8192):
        sources, _ = stream.assignment.locate(rows - stream.plan.first_row)
        for source, row in zip(sources.tolist(), rows.tolist(), strict=True):
            firsts.setdefault(source, row)
    return np.array(sorted(firsts.values()))


def blocks(rows: Int64, size: int = 16) -> Iterator[Int64]:
    return (rows[first : first + size] for first in range(0, len(rows), size))


def private_bytes() -> int:
    """Return the memory of this process that is no mapped file."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


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
        os.environ["XDG_CACHE_HOME"] = folder
        fifteen_trillion_tokens(many_shards(Path(folder), 200))
        datasets = many_shards(Path(folder), 2_000)
        fifteen_trillion_tokens(datasets)
        fifteen_trillion_tokens(datasets, decimals=7)
        ends_of_epochs(datasets)
        many_sources(Path(folder))
        ten_trillion_tokens(Path(folder))
        local_audit(Path(folder))


if __name__ == "__main__":
    match sys.argv[1:]:
        case [plan]:
            start_process(plan)
        case _:
            main()
