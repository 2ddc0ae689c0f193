"""What a dataset holds already, and which files of a corpus are new to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..console.errors import InputError, StorageError
from ..console.log import get_logger
from ..dataplane import manifest, storage
from ..dataplane.manifest import Manifest
from ..dataplane.tokenizers import Tokenizer, id_type
from .job import Job, dataset_url
from .sources import File

log = get_logger(__name__)


def existing(job: Job, output: str, tokenizer: Tokenizer) -> Manifest:
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


def new_files(files: Sequence[File], job: Job, old: Manifest) -> list[File]:
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
