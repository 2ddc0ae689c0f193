"""A build: find the corpus, cut it into tasks, run what is missing, commit the manifest.

    inputs → files → slices → tasks → shards → shard table → manifest

Nothing that this writes is visible as a dataset before the manifest is, and the manifest is
written last, in one piece. Everything before it can be killed and run again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, Literal

from .. import __version__
from ..console.errors import InputError, StorageError
from ..console.log import get_logger
from ..console.progress import Progress
from ..dataplane import manifest, storage
from ..dataplane.manifest import Generation, Manifest, Shard
from ..dataplane.tokenizers import Tokenizer, id_type
from ..dataplane.tokenizers.bpe import BpeConfig, BpeTokenizer
from ..dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from . import engines
from .inputs import find
from .sources import File, Slice, SourceConfig, source
from .tasks import WORK, BuildTask, Job, Record, Task, dataset_url, index_entry

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    inputs: tuple[str, ...]
    """Files, globs, folders and URLs."""
    out: str
    """The URL of the dataset."""
    tokenizer: str
    """`byte`, or the path of a tokenizer.json."""
    format: Literal["arrow", "mds"] = "arrow"
    source: SourceConfig = field(default_factory=SourceConfig)
    byte: ByteConfig = field(default_factory=ByteConfig)
    bpe: BpeConfig = field(default_factory=BpeConfig)
    shard_size: int = 64 << 20
    """Bytes of tokens after which a shard is closed."""
    slice_size: int = 64 << 20
    """Bytes of the corpus that a task reads."""
    compression: str | None = None
    """`zstd` or `zstd:LEVEL` (MDS only)."""
    splits: dict[str, float] = field(default_factory=dict)
    """Shares of documents held out into datasets of their own, by name."""
    max_document_tokens: int | None = None
    """Split what is longer, each piece with its end of document."""
    on_error: Literal["fail", "skip"] = "fail"
    """What to do about a record that cannot be read."""
    workers: int | None = None
    """Processes; None: as many as there are cores."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("inputs is empty")
        if self.compression is not None:
            name, _, level = self.compression.partition(":")
            if name != "zstd" or not (level.isdigit() or not level):
                raise ValueError(f"compression is `{self.compression}`, not zstd or zstd:LEVEL")
            if self.format != "mds":
                raise ValueError("only the mds format can be compressed")
        if (
            any(not 0 < share < 1 for share in self.splits.values())
            or sum(self.splits.values()) >= 1
        ):
            raise ValueError("splits are shares between 0 and 1 that leave something for `train`")
        if "train" in self.splits:
            raise ValueError("`train` is what the splits leave over")
        if self.max_document_tokens is not None and self.max_document_tokens < 2:
            raise ValueError("max_document_tokens is at least 2: a token and the end")


def build(config: BuildConfig) -> dict[str, Manifest]:
    """Build what is missing; returns the manifest of each dataset, by its URL."""
    tokenizer = load_tokenizer(config)
    job = job_of(config, tokenizer)
    before = {name: _existing(job, name, tokenizer) for name in job.outputs}
    files = _new_files(find(config.inputs, config.source), job, before[job.outputs[0]])
    if not files:
        log.info("nothing to do: %s holds every input", config.out)
        return {dataset_url(job.url, name): kept for name, kept in before.items()}
    for name, data in tokenizer.files.items():
        storage.write(storage.join(job.tokenizer_url, name), data)
    tasks = cut(files, config, job)
    run(config, job, tasks)
    return commit(job, tokenizer, files, tasks, before)


def load_tokenizer(config: BuildConfig) -> Tokenizer:
    if config.tokenizer == "byte":
        return ByteTokenizer(config.byte)
    text = storage.read(config.tokenizer)
    return BpeTokenizer(text, config.bpe, source=config.tokenizer)


def job_of(config: BuildConfig, tokenizer: Tokenizer) -> Job:
    out = config.out.rstrip("/")
    return Job(
        url=out,
        format=config.format,
        compression=config.compression,
        shard_size=config.shard_size,
        source=replace(config.source, split_large=config.max_document_tokens is not None),
        tokenizer=tokenizer.info,
        tokenizer_url=storage.join(out, WORK),
        splits=tuple(sorted(config.splits.items())),
        max_document_tokens=config.max_document_tokens,
        skip_bad=config.on_error == "skip",
    )


def cut(files: Sequence[File], config: BuildConfig, job: Job) -> list[Task]:
    """The tasks of a build: large files in slices, small ones together."""
    tasks: list[Task] = []
    together: list[Slice] = []
    for file in files:
        for part in source(file.format).cut(file, job.source, config.slice_size):
            if together and sum(s.size for s in together) + part.size > config.slice_size:
                tasks.append(Task.of(together, job))
                together = []
            together.append(part)
    if together:
        tasks.append(Task.of(together, job))
    return tasks


def run(config: BuildConfig, job: Job, tasks: Sequence[Task]) -> None:
    """Run every task that has not been done."""
    workers = config.workers or engines.default_workers()
    total = sum(task.size for task in tasks)
    with Progress("tokenizing", total=total, unit="B") as progress:
        for event in engines.run_local(BuildTask(job), tasks, workers):
            progress.advance(event.bytes, documents=event.documents, tokens=event.tokens)


def commit(
    job: Job,
    tokenizer: Tokenizer,
    files: Sequence[File],
    tasks: Sequence[Task],
    before: dict[str, Manifest],
) -> dict[str, Manifest]:
    """Append a generation of what the tasks have made, to each dataset; the first one last."""
    records = [Record.load(job.url, task.id, job.outputs) for task in tasks]
    assert all(record.done for record in records)
    counts: Counter[str] = sum((record.counts for record in records), Counter())
    problems = [line for record in records for line in record.problems]
    for line in problems[:20]:
        log.warning("left out: %s", line)
    results = {}
    for name in reversed(job.outputs):
        url = dataset_url(job.url, name)
        shards = [shard for record in records for shard in record.outputs[name].shards]
        provenance = {
            "inputs": _save_inputs(url, files),
            "counts": dict(sorted(counts.items())),
            "problems": problems[:100],
            "versions": _versions(job),
        }
        results[url] = _append(job, name, tokenizer, before[name], shards, provenance)
    clear(storage.join(job.url, WORK))
    return results


def clear(url: str) -> None:
    """Delete a folder."""
    if storage.is_local(url):
        shutil.rmtree(storage.local_path(url), ignore_errors=True)
        return
    for name in storage.list_files(url):
        storage.delete(storage.join(url, name))


def _append(
    job: Job,
    output: str,
    tokenizer: Tokenizer,
    old: Manifest,
    shards: Sequence[Shard],
    provenance: dict[str, Any],
) -> Manifest:
    url = dataset_url(job.url, output)
    inputs = provenance["inputs"]["hash"]
    if any(made.provenance["inputs"]["hash"] == inputs for made in old.generations):
        return old  # this dataset was committed before the build was killed
    if not shards and not old.generations:
        raise InputError(
            f"no documents for {url}",
            mend="the inputs hold none, or a split is too small to get any",
        )
    table, digest = manifest.save_table(url, shards)
    new = old.append(
        Generation(
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            size=sum(shard.size for shard in shards),
            shards=len(shards),
            table=table,
            table_hash=digest,
            provenance=provenance,
        )
    )
    for name, data in tokenizer.files.items():
        storage.write(storage.join(url, name), data)
    if job.format == "mds":
        _save_index(url, new, job, weighted=tokenizer.palette is not None)
    manifest.save(url, new)
    log.info(
        "%s: %d documents, %d tokens in %d shards", url, new.documents, new.tokens, len(shards)
    )
    return new


def _save_index(url: str, new: Manifest, job: Job, *, weighted: bool) -> None:
    shards = [
        index_entry(shard, job, new.dtype, weighted=weighted)
        for generation in new.generations
        for shard in manifest.load_table(url, generation)
    ]
    data = json.dumps({"version": 2, "shards": shards}, sort_keys=True)
    storage.write(storage.join(url, "index.json"), data.encode())


def _existing(job: Job, output: str, tokenizer: Tokenizer) -> Manifest:
    """The dataset that a build appends to, or one without generations."""
    url = dataset_url(job.url, output)
    settings = job.identity()
    settings = json.loads(json.dumps(settings))
    empty = Manifest(
        format=job.format,
        dtype=id_type(tokenizer.info.vocab_size),
        tokenizer=tokenizer.info,
        weights=tokenizer.palette,
        settings=settings,
    )
    if not storage.exists(storage.join(url, manifest.NAME)):
        return empty
    old = manifest.load(url)
    if replace(old, generations=()) != empty:
        raise StorageError(
            f"the dataset at {url} was built with other settings: {_difference(old, empty)}",
            mend="use the same settings to add files to it, or build at another URL",
        )
    return old


def _difference(old: Manifest, new: Manifest) -> str:
    pairs: dict[str, Any] = {
        "tokenizer": (old.tokenizer.fingerprint[:12], new.tokenizer.fingerprint[:12])
    }
    specs = (old.tokenizer.spec, new.tokenizer.spec)
    pairs |= {key: (specs[0].get(key), specs[1].get(key)) for key in specs[1]}
    pairs |= {
        key: (old.settings.get(key), new.settings.get(key))
        for key in new.settings
        if key != "tokenizer"
    }
    told = [f"{key} was {was}, is {now}" for key, (was, now) in pairs.items() if was != now]
    return "; ".join(told) or "its format has changed"


def _new_files(files: Sequence[File], job: Job, old: Manifest) -> list[File]:
    """Files that no generation holds. One that has changed since is refused."""
    url = dataset_url(job.url, job.outputs[0])
    known: dict[str, str] = {}
    for generation in old.generations:
        data = storage.read(storage.join(url, generation.provenance["inputs"]["name"]))
        known.update({name: mark for name, _, mark in json.loads(data)})
    held = set(known.values())
    new = []
    for file in files:
        if file.fingerprint in held:
            if file.name not in known:
                log.warning("%s is left out: %s holds its content already", file.name, url)
        elif file.name in known:
            raise InputError(
                f"{file.name} has changed since it was built into {url}",
                mend="a dataset only grows: give new documents in new files, or build at "
                "another URL",
            )
        else:
            new.append(file)
    return new


def _save_inputs(url: str, files: Sequence[File]) -> dict[str, Any]:
    data = json.dumps([[file.name, file.size, file.fingerprint] for file in files]).encode()
    digest = hashlib.sha256(data).hexdigest()
    name = f"tables/{digest[:32]}.inputs.json"
    storage.write(storage.join(url, name), data)
    size = sum(file.size for file in files)
    return {"name": name, "hash": digest, "files": len(files), "bytes": size}


def _versions(job: Job) -> dict[str, str]:
    names = ["pyarrow", *(["tokenizers", "tiktoken"] if job.tokenizer.kind == "bpe" else [])]
    return {"headrace": __version__, **{name: version(name) for name in names}}
