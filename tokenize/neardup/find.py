"""Find near-duplicates in a corpus, and write a drop list.

    inputs → slices → bands (tasks) → pairs (tasks) → clusters → drop list

The number of workers does not change the results. To resume a killed search, run it again: finished
tasks are not repeated.
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
from ...console.progress import Progress, exact_count
from ...dataplane.storage import storage
from .. import executors, sources
from ..builder.lock import BuildLock
from ..builder.settings import LOCKS, work_url
from ..chat.config import ChatFields
from ..chat.messages import MessageContents
from ..corpus.inputs import find_files, is_within
from ..executors import ExecutorConfig
from ..files.file_hashes import hash_files
from ..files.input_file import File
from ..sources.format import OnError, Slice, SourceConfig
from . import results
from .bands import BandTask, BandWorker, read_places
from .clusters import connect_clusters
from .job import PARTS, STATES, NeardupJob, TaskSizes, finished_state
from .lsh import LshConfig
from .pairs import PairTask, PairWorker
from .results import Results
from .signatures import import_rensa

log = get_logger(__name__)

SLICE_BYTES = 16 << 20
MAX_SEGMENTS = 64


@dataclass(frozen=True, kw_only=True)
class NeardupConfig:
    inputs: tuple[str, ...]
    """Files, globs, folders and URLs."""
    out: str
    """The drop list, a Parquet file."""
    source: SourceConfig = field(default_factory=SourceConfig)
    """Settings for reading the corpus."""
    conversations: ChatFields | None = None
    """Fields in a record that hold a conversation; None: a record is a text."""
    lsh: LshConfig = field(default_factory=LshConfig)
    """Search settings."""
    on_error: OnError = "fail"
    """fail: stop at a record that cannot be read; skip: leave it out."""
    slice_size: int = SLICE_BYTES
    """Corpus bytes that a task reads."""
    engine: ExecutorConfig = field(default_factory=ExecutorConfig)
    """Executor for the tasks."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("inputs is empty")
        if self.conversations is not None and self.source.text_field != SourceConfig().text_field:
            raise ValueError("conversations and text_field: a conversation has fields of its own")
        if self.slice_size < 1:
            raise ValueError(f"slice_size is {self.slice_size}; it must be at least 1 byte")


def find_neardups(config: NeardupConfig, sizes: TaskSizes | None = None) -> Results:
    """Search a corpus; write the drop list and tables, and return the results."""
    folder = results.results_folder(config.out)
    if config.conversations is not None:
        chat = MessageContents(fields=config.conversations)
        config = replace(config, source=replace(config.source, chat=chat))
    files, _, _ = run_all(
        lambda: find_files(config.inputs, config.source, config.out),
        lambda: storage.check_writable(config.out, file=True),
        import_rensa,
    )
    with BuildLock(work_url(folder, LOCKS)) as lock:
        results.remove_half_written(config.out)
        files = [file for file in files if not is_within(file.name, folder)]  # earlier results
        hashed = hash_files(files)
        files = _drop_copies(hashed.files)
        inputs = [[file.name, file.size, file.fingerprint] for file in files]
        job = _make_job(config, sizes or TaskSizes(), work_url(folder), files)
        settings = json.loads(json.dumps({**job.identity(), "slice_size": config.slice_size}))
        earlier = results.load(config.out)
        if (
            earlier is not None
            and (earlier.settings, earlier.inputs) == (settings, inputs)
            and results.is_intact(config.out, earlier)
        ):
            log.info("nothing to do: %s is the list of these inputs", config.out)
            return earlier
        tasks = _cut_tasks(files, config, job)
        _run(config, "signatures", BandWorker(job), tasks)
        hashed.check_unchanged(files)
        worker = PairWorker(job, tuple(task.id for task in tasks))
        if not worker.parts:
            raise InputError("the inputs have no documents", where=", ".join(config.inputs))
        pair_tasks = worker.plan()
        with Progress("comparing", total=len(pair_tasks), unit="") as progress:
            for count in executors.run(config.engine, worker, pair_tasks):
                progress.advance(count)
        lock.check()
        search = _finish(config, job, tasks, worker, pair_tasks, (settings, inputs))
        _remove_work(folder)
        return search


def _make_job(
    config: NeardupConfig, sizes: TaskSizes, work: str, files: Sequence[File]
) -> NeardupJob:
    segments = sum(file.size for file in files) // sizes.segment_bytes
    return NeardupJob(
        work=work,
        source=config.source,
        skip_bad=config.on_error == "skip",
        lsh=config.lsh,
        segments=min(MAX_SEGMENTS, 1 << int(segments).bit_length()),
        sizes=sizes,
    )


def _drop_copies(files: Sequence[File]) -> list[File]:
    """Drop copies of earlier files: a drop list names documents by their file's hash,
    so it cannot tell a copy from the original."""
    originals: dict[str, File] = {}
    for file in files:
        original = originals.setdefault(file.fingerprint, file)
        if original is not file:
            log.warning("%s is left out: it is a copy of %s", file.name, original.name)
    return list(originals.values())


def _cut_tasks(files: Sequence[File], config: NeardupConfig, job: NeardupJob) -> list[BandTask]:
    """Cut files into tasks: large files into several, small files together into one."""
    task_slices: list[list[Slice]] = []
    size = 0
    for file in files:
        for file_slice in sources.cut(file, job.source, config.slice_size, skip_bad=job.skip_bad):
            if not task_slices or size + file_slice.size > config.slice_size:
                task_slices.append([])
                size = 0
            task_slices[-1].append(file_slice)
            size += file_slice.size
    return [BandTask.make(group, job) for group in task_slices]


def _run(config: NeardupConfig, label: str, worker: BandWorker, tasks: Sequence[BandTask]) -> None:
    with Progress(label, total=sum(task.size for task in tasks), unit="B") as progress:
        for event in executors.run(config.engine, worker, tasks):
            progress.advance(event.bytes, documents=event.documents)


def _finish(
    config: NeardupConfig,
    job: NeardupJob,
    tasks: Sequence[BandTask],
    worker: PairWorker,
    pair_tasks: Sequence[PairTask],
    settings_and_inputs: tuple[dict[str, Any], list[list[Any]]],
) -> Results:
    """Write the drop list, then the tables, then the results."""
    settings, inputs = settings_and_inputs
    clusters = connect_clusters(lambda: map(worker.pairs, pair_tasks))
    file_numbers = {name: k for k, (name, _, _) in enumerate(inputs)}
    states = [finished_state(job, task.id) for task in tasks]

    def places() -> Iterator[tuple[Any, Any]]:
        for task, state in zip(tasks, states, strict=True):
            task_file_numbers = np.array([file_numbers[name] for name in task.files], np.int64)
            for part in state["parts"]:
                part_places = read_places(job, part)
                yield task_file_numbers[part_places["file"]], part_places["record"]

    digest, table_names = results.write_tables(
        config.out,
        clusters,
        inputs,
        places(),
        ((task.band, worker.pairs(task)) for task in pair_tasks),
    )
    counts: Counter[str] = sum((Counter(state["counts"]) for state in states), Counter())
    problems = [line for state in states for line in state["problems"]]
    for line in problems[:20]:
        log.warning("left out: %s", line)
    search = Results(
        settings=settings,
        inputs=inputs,
        documents=int(worker.bases[-1]),
        clusters=clusters.count,
        duplicates=len(clusters.dropped),
        counts=dict(sorted(counts.items())),
        problems=problems[:100],
        drop_list=digest,
        files=table_names,
    )
    results.save(config.out, search)
    results.remove_unreferenced(config.out, search)
    return search


def _remove_work(folder: str) -> None:
    """Remove the tasks' states, then the files that they name."""
    for name in (STATES, PARTS):
        url = work_url(folder, name)
        for file in storage.list_files(url):
            storage.delete(storage.join(url, file))
        if storage.is_local(url):
            shutil.rmtree(storage.local_path(url), ignore_errors=True)


def describe(search: Results, out: str) -> str:
    """Describe the results as text."""
    lsh = LshConfig(**{name: search.settings[name] for name in ("ngram", "bands", "rows", "seed")})
    share = search.duplicates / max(1, search.documents)
    curve = ", ".join(f"{s:g}: {p:.1%}" for s, p in lsh.curve)
    return "\n".join(
        [
            f"{out}: {search.duplicates:,} of "
            f"{exact_count(search.documents, 'documents')} ({share:.1%}) are "
            f"near-duplicates of others, in {search.clusters:,} clusters",
            f"  {lsh.bands} bands of {lsh.rows} rows over runs of {lsh.ngram} words; probability "
            "to find a pair, by its similarity:",
            f"  {curve}",
            *(f"  {name}: {count:,}" for name, count in search.counts.items()),
        ]
    )
