"""Generations of a dataset: which files are new, and which shards are lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...console.errors import InputError, StorageError
from ...console.log import get_logger
from ...dataplane.datasets import fields, manifest
from ...dataplane.datasets.manifest import Generation, Manifest
from ...dataplane.storage import storage
from ...dataplane.storage.verified import read_named
from ...dataplane.tokenizers import Tokenizer, id_type, marks
from ..files.input_file import File
from ..sources.fields import FieldKind, KeptField
from .settings import BuildJob, dataset_url

log = get_logger(__name__)

OPTIONS = {"seed": "shuffle", "splits": "split", "skip_bad": "skipping bad records"}
"""Option names of settings whose name in a manifest differs."""


def existing(job: BuildJob, output: str, tokenizer: Tokenizer) -> Manifest:
    """Return the manifest that a build appends to, or one without generations."""
    url = dataset_url(job.url, output)
    settings = job.identity()
    settings = json.loads(json.dumps(settings))
    empty = Manifest(
        format=job.format,
        dtype=id_type(tokenizer.info.vocab_size),
        tokenizer=tokenizer.info,
        weights=marks.WEIGHTS if job.masks else tokenizer.weight_table,
        settings=settings,
    )
    if not storage.exists(storage.join(url, manifest.NAME)):
        return empty
    old = manifest.load(url)
    if replace(old, generations=()) != empty:
        raise StorageError(
            f"the dataset at {url} was built with other settings: {_difference(old, empty)}",
            hint="use the same settings to add files to it, or build at another URL",
        )
    return old


def kept_types(url: str, outputs: Sequence[str]) -> dict[str, FieldKind]:
    """Return the types of the fields that a dataset keeps, by name; empty if there is none yet."""
    for name in outputs:
        where = dataset_url(url, name)
        if storage.exists(storage.join(where, manifest.NAME)):
            return dict(manifest.load(where).kept_fields)  # type: ignore[arg-type]
    return {}


def _difference(old: Manifest, new: Manifest) -> str:
    pairs: dict[str, Any] = {
        "tokenizer": (old.tokenizer.fingerprint[:12], new.tokenizer.fingerprint[:12])
    }
    specs = (old.tokenizer.spec, new.tokenizer.spec)
    pairs |= {key: (specs[0].get(key), specs[1].get(key)) for key in specs[1]}
    were, are = _flat(old.settings), _flat(new.settings)
    names = dict.fromkeys([*are, *were])
    pairs |= {key: (were.get(key), are.get(key)) for key in names if key != "tokenizer"}
    differences = [
        f"{OPTIONS.get(key, key)} was {_shown(was)}, is {_shown(now)}"
        for key, (was, now) in pairs.items()
        if was != now
    ]
    return "; ".join(differences) or "its format has changed"


def _shown(setting: Any) -> str:
    if isinstance(setting, list) and setting and all("name" in item for item in setting):
        return ",".join(str(KeptField(**item)) for item in setting)
    return "not given" if setting is None else str(setting)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Move the settings of source and template to the top level; `format` is the shards' there."""
    source = dict(settings.get("source", {}))
    chat = {f"chat {key}": value for key, value in (settings.get("chat") or {}).items()}
    chat.pop("chat source", None)  # the text of the template, which has a hash
    flat = {**settings, "source": None, "chat": None, **chat}
    return {**flat, "input_format": source.pop("format", None), **source}


def new_files(files: Sequence[File], job: BuildJob, old: Manifest) -> list[File]:
    """Return the files that no generation contains. A file that changed since it was built is an
    error."""
    url = dataset_url(job.url, job.outputs[0])
    known: dict[str, str] = {}
    for generation in old.generations:
        known.update(_inputs(url, generation))
    held = set(known.values())
    new = []
    for file in files:
        if file.fingerprint in held:
            if file.name not in known:
                log.warning("%s is left out: %s already has its content", file.name, url)
        elif file.name in known:
            raise InputError(
                f"{file.name} has changed since it was built into {url}",
                hint="put new documents in new files, or build at another URL",
            )
        else:
            new.append(file)
    return new


def missing(job: BuildJob, before: dict[str, Manifest]) -> dict[int, set[str]]:
    """Return the tasks whose shards are in a manifest but not in the store, by generation."""
    lost: dict[int, set[str]] = {}
    for name, held in before.items():
        url = dataset_url(job.url, name)
        stored = {
            f"{folder}/{name}"
            for folder in (("shards", *([fields.FOLDER] if job.source.keep else [])))
            if held.generations
            for name in storage.list_files(storage.join(url, folder))
        }
        for number, generation in enumerate(held.generations):
            for shard in manifest.load_table(url, generation):
                files = {shard.stored_name or shard.name}
                if (beside := fields.file_of(shard)) is not None:
                    files.add(beside.name)
                if not files <= stored:
                    lost.setdefault(number, set()).add(shard.task)
    return lost


def files_of(job: BuildJob, output: str, made: Generation, inputs: Sequence[File]) -> list[File]:
    """Return the inputs that a generation of a dataset was built from."""
    url = dataset_url(job.url, output)
    by_content = {(file.name, file.fingerprint): file for file in inputs}
    files = []
    for name, fingerprint in _inputs(url, made).items():
        if (name, fingerprint) not in by_content:
            raise InputError(
                f"{url} lost shards or was not finished, and needs {name} again, which is not "
                "among the inputs or has changed",
                hint="pass the same inputs as when the dataset was built",
            )
        files.append(by_content[name, fingerprint])
    return files


def _inputs(url: str, generation: Generation) -> dict[str, str]:
    """Return the names and fingerprints of the files that a generation was built from."""
    data = read_named(url, generation.provenance["inputs"]["name"])
    return {name: fingerprint for name, _, fingerprint in json.loads(data)}
