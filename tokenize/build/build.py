"""A build: find the corpus, cut it into tasks, run what is missing, commit the manifest.

    inputs → files → slices → tasks → shards → shard table → manifest

Nothing that this writes is visible as a dataset before the manifest is, and the manifest is
written last, in one piece. Everything before it can be killed and run again.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...console.log import get_logger
from ...console.progress import Progress
from ...dataplane.datasets.manifest import Generation, Manifest
from ...dataplane.shards import shard_format, writable_formats
from ...dataplane.storage import storage
from ...dataplane.tokenizers import Tokenizer, bpe
from ...dataplane.tokenizers.bpe import BpeConfig, BpeTokenizer
from ...dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from .. import executors as engines
from .. import sources
from ..corpus.file_hashes import check_unchanged, fingerprinted
from ..corpus.inputs import find
from ..executors import EngineConfig
from ..sources import File, Slice, SourceConfig
from .commit import Made, commit, write_index_files
from .dedup import DigestTask, decide
from .garbage import FOLDERS, clear
from .generations import existing, files_of, missing, new_files
from .lock import Claim
from .settings import CLAIMS, DROPS, WORK, BuildJob, dataset_url, work_url
from .shuffle import GatherTask, ranges
from .task_state import Record
from .tasks import BuildTask, Task

log = get_logger(__name__)

SPLIT = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    inputs: tuple[str, ...]
    """Files, globs, folders and URLs."""
    out: str
    """The URL of the dataset."""
    tokenizer: str
    """`byte`, or the path of a tokenizer.json."""
    format: str = "arrow"
    """Of the shards: a name in dataplane.shards.FORMATS."""
    source: SourceConfig = field(default_factory=SourceConfig)
    """How the corpus is read."""
    byte: ByteConfig | None = None
    """Where the tokenizer is `byte`."""
    bpe: BpeConfig | None = None
    """Where the tokenizer is a JSON file."""
    shard_size: int = 64 << 20
    """Bytes of tokens after which a shard is closed."""
    slice_size: int = 16 << 20
    """Bytes of the corpus that a task reads. Workers end within one slice of each other."""
    compression: str | None = None
    """`zstd` or `zstd:LEVEL` (formats that can be compressed: mds)."""
    splits: dict[str, float] = field(default_factory=dict)
    """Shares of documents held out into datasets of their own, by name."""
    shuffle: int | None = None
    """A seed: documents are shuffled across the whole build."""
    dedup: Literal["exact"] | None = None
    """exact: of byte-equal documents only the first one is kept."""
    max_document_tokens: int | None = None
    """Split what is longer, each piece with its end of document."""
    on_error: Literal["fail", "skip"] = "fail"
    """What to do about a record that cannot be read."""
    rehash: bool = False
    """Hash every input, also those whose hashes are remembered and that seem not to have
    changed."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Where tasks run."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("inputs is empty")
        if self.byte is not None and self.tokenizer != "byte":
            raise ValueError("`byte` is for the tokenizer `byte`; a JSON file's settings are `bpe`")
        if self.bpe is not None and self.tokenizer == "byte":
            raise ValueError("`bpe` is for a tokenizer's JSON file, and the tokenizer is `byte`")
        if self.format not in (formats := writable_formats()):
            raise ValueError(f"format is `{self.format}`, not {' or '.join(formats)}")
        if self.compression is not None:
            name, _, level = self.compression.partition(":")
            if name != "zstd" or not (level.isdigit() or not level):
                raise ValueError(f"compression is `{self.compression}`, not zstd or zstd:LEVEL")
            if not shard_format(self.format).compressible:
                raise ValueError(f"the {self.format} format cannot be compressed")
        check_splits(self.splits)
        for name in ("shard_size", "slice_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least one byte is needed")
        if self.max_document_tokens is not None and self.max_document_tokens < 2:
            raise ValueError("max_document_tokens is at least 2: a token and the end")


def check_splits(splits: Mapping[str, float]) -> None:
    """A split is a folder beside those that a build makes for itself, with a share of its own."""
    for name in splits:
        if name == "train":
            raise ValueError("`train` is what the splits leave over")
        if not SPLIT.fullmatch(name):
            raise ValueError(f"a split is named by letters, digits, - and _, not `{name}`")
        if name in (WORK, *FOLDERS):
            raise ValueError(
                f"a split cannot be called `{name}`: a build has a folder of that name"
            )
    if any(not 0 < share < 1 for share in splits.values()) or sum(splits.values()) >= 1:
        raise ValueError("splits are shares between 0 and 1 that leave something for `train`")


def build(config: BuildConfig) -> dict[str, Manifest]:
    """Build what is missing; returns the manifest of each dataset, by its URL."""
    tokenizer = load_tokenizer(config)
    if isinstance(tokenizer, BpeTokenizer) and tokenizer.slow_because:
        log.warning("tokenizing at the speed of `tokenizers`: %s", tokenizer.slow_because)
    job = job_of(config, tokenizer)
    with Claim(work_url(job.url, CLAIMS)) as claim:
        held = {name: existing(job, name, tokenizer) for name in job.outputs}
        began = time.time()
        found = fingerprinted(find(config.inputs, config.source, job.url), again=config.rehash)
        last = job.outputs[0]  # the dataset that is committed after the others
        ahead = max(held, key=lambda name: len(held[name].generations))

        def append(files: Sequence[File]) -> dict[str, Manifest]:
            """The datasets with one more generation, made of these files."""
            made = make(config, job, files, held[last].generations)
            check_unchanged(files, began)
            claim.check()
            return commit(job, tokenizer, files, made, held)

        for number, tasks in missing(job, held).items():
            files = files_of(job, ahead, held[ahead].generations[number], found)
            log.warning("making %d lost shards of generation %d again", len(tasks), number)
            for task in tasks:
                Record.forget(job.url, task)  # one that has outlived its shards
            make(config, job, files, held[last].generations[:number], only=tasks)
        finished = len(held[last].generations)
        if len(held[ahead].generations) > finished:
            # Killed between two manifests: some of the datasets have this generation already.
            log.warning("finishing generation %d first", finished)
            held = append(files_of(job, ahead, held[ahead].generations[finished], found))
        if files := new_files(found, job, held[last]):
            held = append(files)
        else:
            log.info("nothing to do: %s holds every input", config.out)
        write_index_files(job, held)
        clear(job, held)
        return {dataset_url(job.url, name): held[name] for name in job.outputs}


def make(
    config: BuildConfig,
    job: BuildJob,
    files: Sequence[File],
    earlier: Sequence[Generation],
    only: Collection[str] | None = None,
) -> Made:
    """Run the tasks that turn files into shards: all that are not done, or `only` some."""
    tasks = cut(files, config, job)
    idle = engines.local_workers(config.engine) - len(tasks)
    if idle > 0 and any(file.compression and file.size > config.slice_size for file in files):
        log.info("workers with nothing to do: %d (a compressed file is read by one)", idle)
    digests: list[bytes] = []
    if job.dedup:
        tasks, digests = deduplicate(config, job, tasks, earlier)
    if job.seed is None:
        tasks = [task for task in tasks if only is None or task.id in only]
    run(config, "tokenizing", BuildTask(job), tasks)
    records = [Record.load(job.url, task.id, job.outputs) for task in tasks]
    if job.seed is None:
        return Made(records, records, digests)
    parts = [part for part in ranges(job, records) if only is None or part.id in only]
    run(config, "shuffling", GatherTask(job), parts)
    gathered = [Record.load(job.url, part.id, [part.output]) for part in parts]
    return Made(records, gathered, digests)


def load_tokenizer(config: BuildConfig) -> Tokenizer:
    if config.tokenizer == "byte":
        return ByteTokenizer(config.byte or ByteConfig())
    return bpe.load(config.tokenizer, config.bpe or BpeConfig())


def job_of(config: BuildConfig, tokenizer: Tokenizer) -> BuildJob:
    out = config.out.rstrip("/")
    return BuildJob(
        url=out,
        format=config.format,
        compression=config.compression,
        shard_size=config.shard_size,
        source=replace(config.source, split_large=config.max_document_tokens is not None),
        tokenizer=tokenizer.info,
        tokenizer_files=tokenizer.files,
        splits=tuple(sorted(config.splits.items())),
        max_document_tokens=config.max_document_tokens,
        skip_bad=config.on_error == "skip",
        seed=config.shuffle,
        dedup=config.dedup is not None,
    )


def cut(files: Sequence[File], config: BuildConfig, job: BuildJob) -> list[Task]:
    """The tasks of a build: large files in slices, small ones together."""
    tasks: list[Task] = []
    together: list[Slice] = []
    for file in files:
        for part in sources.cut(file, job.source, config.slice_size, skip_bad=job.skip_bad):
            if together and sum(s.size for s in together) + part.size > config.slice_size:
                tasks.append(Task.of(together, job))
                together = []
            together.append(part)
    if together:
        tasks.append(Task.of(together, job))
    return tasks


def deduplicate(
    config: BuildConfig, job: BuildJob, tasks: Sequence[Task], earlier: Sequence[Generation]
) -> tuple[list[Task], list[bytes]]:
    """The same tasks, told what to leave out; and the digests of what stays."""
    run(config, "comparing", DigestTask(job), tasks)
    url = dataset_url(job.url, job.outputs[0])
    held = [
        storage.read(storage.join(url, name))
        for generation in earlier
        for name in generation.provenance["digests"]
    ]
    kept = decide(job, tasks, held)
    told = []
    for task, numbers in zip(tasks, kept.drops, strict=True):
        name = f"{DROPS}/{hashlib.sha256(numbers.tobytes()).hexdigest()[:32]}.bin"
        storage.write(work_url(job.url, name), numbers.tobytes())
        told.append(Task.of(task.slices, job, name))
    return told, kept.digests


def run(config: BuildConfig, label: str, function: Any, tasks: Sequence[Any]) -> None:
    """Run every task that has not been done."""
    total = sum(task.size for task in tasks)
    with Progress(label, total=total, unit="B") as progress:
        for event in engines.run(config.engine, function, tasks):
            told = {"files": event.files, "documents": event.documents, "tokens": event.tokens}
            progress.advance(event.bytes, **{name: n for name, n in told.items() if n})
