"""Build a dataset: find files, cut them into tasks, run unfinished tasks, commit the manifest.

    inputs → files → slices → tasks → shards → shard table → manifest

The manifest is written last, atomically. A build can be killed at any moment and run again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ...console.errors import MisuseError, run_all
from ...console.log import get_logger
from ...console.progress import Progress, format_bytes, format_number
from ...dataplane.datasets.manifest import Generation, Manifest
from ...dataplane.shards import shard_format, writable_formats
from ...dataplane.storage import storage
from ...dataplane.storage.verified import read_named, write_named
from ...dataplane.tokenizers import Tokenizer, bpe, id_type
from ...dataplane.tokenizers.bpe import BpeConfig, BpeTokenizer
from ...dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from .. import executors, sources
from ..chat.config import ChatConfig
from ..corpus.decontaminate import ContaminationAction, StoredEvaluations
from ..corpus.drop_files import read_lists
from ..corpus.drop_list import StoredDrops
from ..corpus.evaluations import EvaluationConfig, read_evaluations
from ..corpus.field_types import resolve_types
from ..corpus.filters import Filter
from ..corpus.genome import Genome, GenomeConfig
from ..corpus.inputs import find_files, store_standard_input
from ..executors import ExecutorConfig
from ..files.file_hashes import hash_files
from ..files.input_file import File
from ..files.standard_input import ARGUMENTS as STDIN_ARGUMENTS
from ..files.standard_input import FOLDER as STDIN
from ..sources.format import OnError, Slice, SourceConfig
from .buckets import BucketWorker, count_buckets, plan_bucket_tasks
from .commit import BuildResult, commit, write_derived_files
from .dedup import DigestWorker, find_duplicates
from .drops import check_drops, check_ids
from .fim import FimConfig, check_tokenizer
from .garbage import remove_garbage
from .generations import (
    find_generation_files,
    find_missing_shards,
    load_kept_types,
    load_or_start,
    select_new_files,
)
from .lock import BuildLock
from .settings import DROPS, LOCKS, BuildJob, check_splits, dataset_url, work_url
from .shuffle import GatherWorker, collect_spills, plan_gather_tasks
from .task_state import TaskState
from .tasks import Task, TokenizeWorker

log = get_logger(__name__)

SMALL_SHARD, MANY_SHARDS = 1 << 20, 1000
"""A build warns about shards below this size if it makes more than this many."""


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    inputs: tuple[str, ...]
    """Files, globs, folders and URLs."""
    out: str
    """The URL of the dataset."""
    tokenizer: str
    """`byte`, or the path of a tokenizer.json."""
    format: str = "arrow"
    """Format of the shards: a name in dataplane.shards.FORMATS."""
    source: SourceConfig = field(default_factory=SourceConfig)
    """Settings of reading the corpus."""
    byte: ByteConfig | None = None
    """Settings of the tokenizer `byte`."""
    bpe: BpeConfig | None = None
    """Settings of a tokenizer that is a JSON file."""
    shard_size: int = 64 << 20
    """Bytes of tokens after which a shard is closed."""
    slice_size: int = 16 << 20
    """Bytes of the corpus that a task reads. Workers finish within one slice of each other."""
    compression: str | None = None
    """`zstd` or `zstd:LEVEL` (formats that can be compressed: mds)."""
    splits: dict[str, float] = field(default_factory=dict)
    """Held-out datasets: fraction of documents, by name (letters, digits, - and _)."""
    shuffle: int | None = None
    """Seed for shuffling documents across the whole build; None: keep their order."""
    shuffle_memory: int | None = None
    """Shuffle through buckets of so many bytes of tokens; files added later need the same."""
    dedup: Literal["exact"] | None = None
    """exact: keep only the first of byte-equal documents."""
    max_document_tokens: int | None = None
    """Split longer documents; each piece ends with the end-of-document id."""
    drop: tuple[str, ...] = ()
    """Files that list documents to leave out. The log and the manifest count each list."""
    filter: str | None = None
    """`module:function` or `./rules.py:function` that decides which documents, or pieces, stay."""
    filter_settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the filter."""
    decontaminate: EvaluationConfig | None = None
    """Evaluations that documents must not contain."""
    contaminated: ContaminationAction = "drop"
    """drop: leave out documents with an n-gram of an evaluation; cut: cut the n-grams out."""
    chat: ChatConfig | None = None
    """The chat template by which records become conversations, and what is learnt of them."""
    genome: GenomeConfig | None = None
    """Windows, strands and lineage tags of sequences, and groups for splits."""
    fim: FimConfig | None = None
    """Rearrange a share of the documents for fill-in-the-middle."""
    on_error: OnError = "fail"
    """fail: stop at a record that cannot be read; skip: leave it out."""
    rehash: bool = False
    """Hash every input again, also files that seem unchanged since their hash was cached."""
    engine: ExecutorConfig = field(default_factory=ExecutorConfig)
    """Executor of the tasks."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("inputs is empty")
        if self.byte is not None and self.tokenizer != "byte":
            raise ValueError("`byte` is for the tokenizer `byte`; use `bpe` for a JSON file")
        if self.bpe is not None and self.tokenizer == "byte":
            raise ValueError("`bpe` is for a tokenizer's JSON file, but the tokenizer is `byte`")
        if self.format not in (formats := writable_formats()):
            raise ValueError(f"format is `{self.format}`, not {' or '.join(formats)}")
        if self.compression is not None:
            name, _, level = self.compression.partition(":")
            if name != "zstd" or not (level.isdigit() or not level):
                raise ValueError(f"compression is `{self.compression}`, not zstd or zstd:LEVEL")
            if not shard_format(self.format).compressible:
                raise ValueError(f"the {self.format} format cannot be compressed")
        if self.filter_settings and self.filter is None:
            raise ValueError("filter_settings needs filter")
        if self.contaminated != "drop" and self.decontaminate is None:
            raise ValueError("contaminated needs decontaminate")
        for name in ("chat", "fim"):
            if getattr(self, name) is not None:
                self._check_documents(name)
        if self.genome is not None:
            document_options = {
                "filter": self.filter,
                "decontaminate": self.decontaminate,
                "max_document_tokens": self.max_document_tokens,
                "on_error: skip": self.on_error == "skip" or None,
            }
            self.genome.check_build(self.byte, self.chat, bool(self.splits), document_options)
        check_splits(self.splits)
        for name in ("shard_size", "slice_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1 byte")
        if self.shuffle_memory is not None:
            if self.shuffle is None:
                raise ValueError("shuffle_memory needs shuffle")
            if self.shuffle_memory < 4 * self.shard_size:
                raise ValueError(
                    f"shuffle_memory is {self.shuffle_memory:,}; it must be at least four times "
                    f"shard_size, {4 * self.shard_size:,}"
                )
        piped = not {*STDIN_ARGUMENTS}.isdisjoint(self.inputs)
        if piped and self.engine.kind == "ray" and not storage.is_local(self.out):
            raise ValueError("standard input is kept on this machine, where other nodes need it")
        if self.max_document_tokens is not None and self.max_document_tokens < 2:
            raise ValueError("max_document_tokens must be at least 2: a token and the end")

    def _check_documents(self, name: str) -> None:
        """Raise for settings that contradict `chat` or `fim`."""
        if self.max_document_tokens is not None:
            raise ValueError(f"{name} needs whole documents, and max_document_tokens splits them")
        if any(settings and settings.parse_special for settings in (self.byte, self.bpe)):
            raise ValueError(
                f"{name} and parse_special: a text that names a special token would imitate one"
            )
        if self.byte is not None and self.byte.mask_control_tags:
            raise ValueError(f"{name} and mask_control_tags: a document may be split within a tag")
        if name == "fim":
            return
        if self.byte is not None and self.byte.dna:
            raise ValueError("chat and dna: a conversation is no genome")
        if self.fim is not None:
            raise ValueError("chat and fim: a conversation has an order of its own")
        if self.contaminated == "cut":
            raise ValueError("chat and contaminated: cut: a conversation is not cut; drop it")
        if self.source.text_field != SourceConfig().text_field:
            raise ValueError("chat and text_field: a conversation has fields of its own")


def build(config: BuildConfig) -> dict[str, Manifest]:
    """Build whatever is missing; return the datasets' manifests by URL."""
    tokenizer, inputs, _, drops, rule, evaluations = run_all(
        lambda: load_tokenizer(config),
        lambda: find_files(config.inputs, config.source, config.out, pipe=True),
        lambda: storage.check_writable(config.out),
        lambda: read_lists(config.drop) if config.drop else None,
        lambda: Filter.load(config.filter, config.filter_settings) if config.filter else None,
        lambda: read_evaluations(config.decontaminate) if config.decontaminate else None,
    )
    if drops is not None:
        check_ids(drops, inputs, config.source)
    if config.fim is not None:
        check_tokenizer(config.fim, tokenizer)
    inputs = store_standard_input(inputs, config.source, work_url(config.out.rstrip("/"), STDIN))
    corpus_bytes = sum(file.size for file in inputs)
    if config.shard_size < SMALL_SHARD and corpus_bytes > MANY_SHARDS * config.shard_size:
        log.warning(
            "--shard-size %s makes up to %s files, of a few documents each; the default is 64Mi",
            format_bytes(config.shard_size),
            format_number(corpus_bytes // config.shard_size),
        )
    is_large = corpus_bytes >= bpe.MIN_FAST_CHARACTERS
    if is_large and isinstance(tokenizer, BpeTokenizer) and tokenizer.slow_reason:
        log.warning("using the slower `tokenizers` library: %s", tokenizer.slow_reason)
    if config.source.keep:
        known_types = load_kept_types(config.out.rstrip("/"), make_job(config, tokenizer).outputs)
        config = replace(config, source=resolve_types(config.source, inputs, known_types))
    config = add_conversations(config, tokenizer, inputs)
    genome = Genome.load(config.genome) if config.genome is not None else None
    job = replace(make_job(config, tokenizer), filter=rule, genome=genome)
    with BuildLock(work_url(job.url, LOCKS)) as lock:
        if drops is not None:
            stored_drops = StoredDrops.write(drops, work_url(job.url), DROPS)
            job = replace(job, drops=stored_drops)
        if evaluations is not None:
            stored_evaluations = StoredEvaluations.write(
                evaluations, config.contaminated, work_url(job.url), DROPS
            )
            job = replace(job, evaluations=stored_evaluations)
        manifests = {name: load_or_start(job, name, tokenizer) for name in job.outputs}
        hashed = hash_files(inputs, rehash=config.rehash)
        inputs = hashed.files
        main_output = job.outputs[0]  # the dataset that is committed after the others
        newest_output = max(manifests, key=lambda name: len(manifests[name].generations))

        def append(files: Sequence[File]) -> dict[str, Manifest]:
            """Append a generation with these files to every dataset."""
            result = run_tasks(config, job, files, manifests[main_output].generations)
            hashed.check_unchanged(files)
            check_drops(job, files, result, manifests[main_output])
            lock.check()
            return commit(job, tokenizer, files, result, manifests)

        for number, tasks in find_missing_shards(job, manifests).items():
            lost = manifests[newest_output].generations[number]
            files = find_generation_files(job, newest_output, lost, inputs)
            log.warning("rebuilding lost shards of generation %d (%d tasks)", number, len(tasks))
            for task in tasks:
                TaskState.delete(job.url, task)  # a state that says its lost shards are finished
            run_tasks(config, job, files, manifests[main_output].generations[:number], only=tasks)
            hashed.check_unchanged(files)
        num_finished = len(manifests[main_output].generations)
        if len(manifests[newest_output].generations) > num_finished:
            # Killed between two manifests: some datasets have this generation already.
            log.warning("finishing generation %d first", num_finished)
            manifests = append(
                find_generation_files(
                    job, newest_output, manifests[newest_output].generations[num_finished], inputs
                )
            )
        if files := select_new_files(inputs, job, manifests[main_output]):
            manifests = append(files)
        else:
            log.info("nothing to do: %s already has every input", config.out)
        write_derived_files(job, manifests)
        remove_garbage(job, manifests)
        return {dataset_url(job.url, name): manifests[name] for name in job.outputs}


def run_tasks(
    config: BuildConfig,
    job: BuildJob,
    files: Sequence[File],
    earlier: Sequence[Generation],
    only: Collection[str] | None = None,
) -> BuildResult:
    """Run unfinished tasks that turn files into shards; `only` limits which."""
    if job.shuffle_memory is not None:
        compressed_bytes = sum(file.size for file in files if file.compression)
        plain_bytes = sum(file.size for file in files) - compressed_bytes
        id_bytes = np.dtype(id_type(job.tokenizer.vocab_size)).itemsize
        job = replace(job, buckets=count_buckets(job, plain_bytes, compressed_bytes, id_bytes))
    tasks = cut(files, config, job)
    num_idle = executors.local_workers(config.engine) - len(tasks)
    if num_idle > 0 and any(file.compression and file.size > config.slice_size for file in files):
        log.info("idle workers: %d (one worker reads a whole compressed file)", num_idle)
    digests: list[bytes] = []
    if job.dedup:
        tasks, digests = deduplicate(config, job, tasks, earlier)
    if job.seed is None:
        tasks = [task for task in tasks if only is None or task.id in only]
    run(config, "tokenizing", TokenizeWorker(job), tasks)
    states = [TaskState.load(job.url, task.id, job.outputs) for task in tasks]
    if job.seed is None:
        return BuildResult(states, states, digests)
    through_buckets = job.buckets is not None
    spills = collect_spills(job, states)
    shard_tasks = (plan_bucket_tasks if through_buckets else plan_gather_tasks)(job, spills)
    unfinished = [task for task in shard_tasks if only is None or task.id in only]
    worker = (BucketWorker if through_buckets else GatherWorker)(job, spills)
    run(config, "shuffling", worker, unfinished)
    gathered = [TaskState.load(job.url, task.id, [task.output]) for task in unfinished]
    return BuildResult(states, gathered, digests)


def load_tokenizer(config: BuildConfig) -> Tokenizer:
    if config.tokenizer == "byte":
        return ByteTokenizer(config.byte or ByteConfig())
    return bpe.load(config.tokenizer, config.bpe or BpeConfig())


def add_conversations(
    config: BuildConfig, tokenizer: Tokenizer, inputs: Sequence[File]
) -> BuildConfig:
    """Add the chat template to the configuration, if records are conversations."""
    if config.chat is None:
        return config
    from ..chat.find import load_chat  # imports jinja2

    for file in inputs:
        if "chat" not in sources.corpus_format(file.format).settings:
            raise MisuseError(
                f"--chat reads JSON lines, Parquet and Arrow, and {file.name} is {file.format}",
                hint="convert the file to JSON lines, or build it at another URL",
            )
    chat = load_chat(config.chat, tokenizer, config.tokenizer)
    return replace(config, source=replace(config.source, chat=chat))


def make_job(config: BuildConfig, tokenizer: Tokenizer) -> BuildJob:
    out = config.out.rstrip("/")
    windows = config.genome is not None and config.genome.window is not None
    splits_large = config.max_document_tokens is not None or windows
    return BuildJob(
        url=out,
        format=config.format,
        compression=config.compression,
        shard_size=config.shard_size,
        source=replace(config.source, split_large=splits_large),
        tokenizer=tokenizer.info,
        tokenizer_files=tokenizer.files,
        splits=tuple(sorted(config.splits.items())),
        max_document_tokens=config.max_document_tokens,
        skip_bad=config.on_error == "skip",
        seed=config.shuffle,
        shuffle_memory=config.shuffle_memory,
        dedup=config.dedup is not None,
        fim=config.fim,
    )


def cut(files: Sequence[File], config: BuildConfig, job: BuildJob) -> list[Task]:
    """Cut files into tasks: large files into several, small files together into one."""
    tasks: list[Task] = []
    task_slices: list[Slice] = []
    task_bytes = 0
    size = config.slice_size if job.buckets is None else max(config.slice_size, job.spill_size)
    for file in files:
        for file_slice in sources.cut(file, job.source, size, skip_bad=job.skip_bad):
            if task_slices and task_bytes + file_slice.size > size:
                tasks.append(Task.make(task_slices, job))
                task_slices, task_bytes = [], 0
            task_slices.append(file_slice)
            task_bytes += file_slice.size
    if task_slices:
        tasks.append(Task.make(task_slices, job))
    return tasks


def deduplicate(
    config: BuildConfig, job: BuildJob, tasks: Sequence[Task], earlier: Sequence[Generation]
) -> tuple[list[Task], list[bytes]]:
    """Return tasks that leave out duplicates, and the digests of kept documents."""
    run(config, "comparing", DigestWorker(job), tasks)
    url = dataset_url(job.url, job.outputs[0])
    earlier_digests = [
        read_named(url, name) for generation in earlier for name in generation.provenance["digests"]
    ]
    result = find_duplicates(job, tasks, earlier_digests)
    tasks_without_duplicates = []
    for task, numbers in zip(tasks, result.drops, strict=True):
        drops_file = write_named(work_url(job.url), DROPS, "bin", numbers.tobytes())
        tasks_without_duplicates.append(Task.make(task.slices, job, drops_file))
    return tasks_without_duplicates, result.digests


def run(config: BuildConfig, label: str, function: Any, tasks: Sequence[Any]) -> None:
    """Run tasks and show progress."""
    total = sum(task.size for task in tasks)
    with Progress(label, total=total, unit="B") as progress:
        for event in executors.run(config.engine, function, tasks):
            counts = {"files": event.files, "documents": event.documents, "tokens": event.tokens}
            progress.advance(event.bytes, **{name: n for name, n in counts.items() if n})
