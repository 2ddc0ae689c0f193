"""Find near-duplicates of a corpus, and write a drop list.

    inputs → slices → bands (tasks) → pairs (tasks) → clusters → drop list

Results do not depend on the workers. Kill it at any moment and run it again: finished tasks are not
run again.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...console.errors import InputError, run_all
from ...console.log import get_logger
from ...console.progress import Progress
from ...dataplane.storage import storage
from .. import executors, sources
from ..builder.lock import BuildLock
from ..builder.settings import LOCKS, work_url
from ..chat.config import ChatFields
from ..chat.messages import Contents
from ..corpus.inputs import find_files, is_within
from ..executors import ExecutorConfig
from ..files.file_hashes import hash_files
from ..files.input_file import File
from ..sources.format import OnError, Slice, SourceConfig
from . import results
from .bands import BandTask, BandWorker, read_places
from .clusters import clusters_of
from .job import PARTS, STATES, NeardupJob, TaskSizes, finished
from .lsh import LshConfig
from .pairs import PairTask, PairWorker
from .results import Results
from .signatures import rensa

log = get_logger(__name__)

SLICE_BYTES = 16 << 20
MOST_SEGMENTS = 64


@dataclass(frozen=True, kw_only=True)
class NeardupConfig:
    inputs: tuple[str, ...]
    """Files, globs, folders and URLs."""
    out: str
    """The drop list, a Parquet file."""
    source: SourceConfig = field(default_factory=SourceConfig)
    """Settings of reading the corpus."""
    conversations: ChatFields | None = None
    """Fields of a record that hold a conversation; None: a record is a text."""
    lsh: LshConfig = field(default_factory=LshConfig)
    """Settings of the search."""
    on_error: OnError = "fail"
    """fail: stop at a record that cannot be read; skip: leave it out."""
    slice_size: int = SLICE_BYTES
    """Bytes of the corpus that a task reads."""
    engine: ExecutorConfig = field(default_factory=ExecutorConfig)
    """Executor of the tasks."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("inputs is empty")
        if self.conversations is not None and self.source.text_field != SourceConfig().text_field:
            raise ValueError("conversations and text_field: a conversation has fields of its own")
        if self.slice_size < 1:
            raise ValueError(f"slice_size is {self.slice_size}; it must be at least 1 byte")


def find_neardups(config: NeardupConfig, sizes: TaskSizes | None = None) -> Results:
    """Search a corpus; return what was found."""
    folder = results.folder_of(config.out)
    if config.conversations is not None:
        chat = Contents(fields=config.conversations)
        config = replace(config, source=replace(config.source, chat=chat))
    files, _, _ = run_all(
        lambda: find_files(config.inputs, config.source, config.out),
        lambda: storage.check_writable(config.out, file=True),
        rensa,
    )
    with BuildLock(work_url(folder, LOCKS)) as lock:
        results.remove_half_written(config.out)
        files = [file for file in files if not is_within(file.name, folder)]  # earlier results
        hashed = hash_files(files)
        files = _each_once(hashed.files)
        inputs = [[file.name, file.size, file.fingerprint] for file in files]
        job = _job(config, sizes or TaskSizes(), work_url(folder), files)
        settings = json.loads(json.dumps({**job.identity(), "slice_size": config.slice_size}))
        done = results.load(config.out)
        if (
            done is not None
            and (done.settings, done.inputs) == (settings, inputs)
            and results.is_whole(config.out, done)
        ):
            log.info("nothing to do: %s is the list of these inputs", config.out)
            return done
        tasks = _cut(files, config, job)
        _run(config, "signatures", BandWorker(job), tasks)
        hashed.check_unchanged(files)
        worker = PairWorker(job, tuple(task.id for task in tasks))
        if not worker.parts:
            raise InputError("the inputs have no documents", where=", ".join(config.inputs))
        plan = worker.plan()
        with Progress("comparing", total=len(plan), unit="") as progress:
            for count in executors.run(config.engine, worker, plan):
                progress.advance(count)
        lock.check()
        found = _finish(config, job, tasks, worker, plan, (settings, inputs))
        _remove_work(folder)
        return found


def _job(config: NeardupConfig, sizes: TaskSizes, work: str, files: Sequence[File]) -> NeardupJob:
    segments = sum(file.size for file in files) // sizes.segment_bytes
    return NeardupJob(
        work=work,
        source=config.source,
        skip_bad=config.on_error == "skip",
        lsh=config.lsh,
        segments=min(MOST_SEGMENTS, 1 << int(segments).bit_length()),
        sizes=sizes,
    )


def _each_once(files: Sequence[File]) -> list[File]:
    """Return the files without copies of others: a drop list names documents by the hash of their
    file, so it cannot tell a copy from its original."""
    held: dict[str, File] = {}
    for file in files:
        first = held.setdefault(file.fingerprint, file)
        if first is not file:
            log.warning("%s is left out: it is a copy of %s", file.name, first.name)
    return list(held.values())


def _cut(files: Sequence[File], config: NeardupConfig, job: NeardupJob) -> list[BandTask]:
    """Cut files into tasks: a large file into several, small files together into one."""
    groups: list[list[Slice]] = []
    size = 0
    for file in files:
        for part in sources.cut(file, job.source, config.slice_size, skip_bad=job.skip_bad):
            if not groups or size + part.size > config.slice_size:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part.size
    return [BandTask.of(group, job) for group in groups]


def _run(config: NeardupConfig, label: str, worker: BandWorker, tasks: Sequence[BandTask]) -> None:
    with Progress(label, total=sum(task.size for task in tasks), unit="B") as progress:
        for event in executors.run(config.engine, worker, tasks):
            progress.advance(event.bytes, documents=event.documents)


def _finish(
    config: NeardupConfig,
    job: NeardupJob,
    tasks: Sequence[BandTask],
    worker: PairWorker,
    plan: Sequence[PairTask],
    of: tuple[dict[str, Any], list[list[Any]]],
) -> Results:
    """Write the drop list, the tables, and last the results."""
    settings, inputs = of
    clusters = clusters_of(lambda: map(worker.pairs, plan))
    number = {name: k for k, (name, _, _) in enumerate(inputs)}
    states = [finished(job, task.id) for task in tasks]

    def places() -> Iterator[tuple[Any, Any]]:
        for task, state in zip(tasks, states, strict=True):
            owner = np.array([number[name] for name in task.files], np.int64)
            for part in state["parts"]:
                held = read_places(job, part)
                yield owner[held["file"]], held["record"]

    digest, names = results.write_tables(
        config.out,
        clusters,
        inputs,
        places(),
        ((task.band, worker.pairs(task)) for task in plan),
    )
    counts: Counter[str] = sum((Counter(state["counts"]) for state in states), Counter())
    problems = [line for state in states for line in state["problems"]]
    for line in problems[:20]:
        log.warning("left out: %s", line)
    found = Results(
        settings=settings,
        inputs=inputs,
        documents=int(worker.bases[-1]),
        clusters=clusters.count,
        duplicates=len(clusters.dropped),
        counts=dict(sorted(counts.items())),
        problems=problems[:100],
        drop_list=digest,
        files=names,
    )
    results.save(config.out, found)
    results.remove_others(config.out, found)
    return found


def _remove_work(folder: str) -> None:
    """Remove the states of tasks, then the files that they name."""
    for name in (STATES, PARTS):
        where = work_url(folder, name)
        for file in storage.list_files(where):
            storage.delete(storage.join(where, file))
        if storage.is_local(where):
            shutil.rmtree(storage.local_path(where), ignore_errors=True)


def describe(found: Results, out: str) -> str:
    """Return the results as text."""
    lsh = LshConfig(**{name: found.settings[name] for name in ("ngram", "bands", "rows", "seed")})
    share = found.duplicates / max(1, found.documents)
    curve = ", ".join(f"{s:g}: {p:.1%}" for s, p in lsh.curve)
    return "\n".join(
        [
            f"{out}: {found.duplicates:,} of {found.documents:,} documents ({share:.1%}) are "
            f"near-duplicates of others, in {found.clusters:,} clusters",
            f"  {lsh.bands} bands of {lsh.rows} rows over runs of {lsh.ngram} words; probability "
            "to find a pair, by its similarity:",
            f"  {curve}",
            *(f"  {name}: {count:,}" for name, count in found.counts.items()),
        ]
    )
