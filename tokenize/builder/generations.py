"""A dataset's generations: which files are new, and which shards are lost."""

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
"""Option names, for settings that manifests name differently."""


def load_or_start(job: BuildJob, output: str, tokenizer: Tokenizer) -> Manifest:
    """Load the manifest that a build extends, or return one without generations."""
    url = dataset_url(job.url, output)
    settings = job.identity()
    settings = json.loads(json.dumps(settings))
    new_manifest = Manifest(
        format=job.format,
        dtype=id_type(tokenizer.info.vocab_size),
        tokenizer=tokenizer.info,
        weights=marks.WEIGHT_TABLE if job.masks else tokenizer.weight_table,
        settings=settings,
    )
    if not storage.exists(storage.join(url, manifest.NAME)):
        return new_manifest
    stored_manifest = manifest.load(url)
    if replace(stored_manifest, generations=()) != new_manifest:
        difference = _describe_difference(stored_manifest, new_manifest)
        raise StorageError(
            f"the dataset at {url} was built with other settings: {difference}",
            hint="use the same settings to add files to it, or build at another URL",
        )
    return stored_manifest


def load_kept_types(url: str, outputs: Sequence[str]) -> dict[str, FieldKind]:
    """Return the types of a dataset's kept fields, by name; empty if there is no dataset yet."""
    for name in outputs:
        output_url = dataset_url(url, name)
        if storage.exists(storage.join(output_url, manifest.NAME)):
            return dict(manifest.load(output_url).kept_fields)  # type: ignore[arg-type]
    return {}


def _describe_difference(old: Manifest, new: Manifest) -> str:
    pairs: dict[str, Any] = {
        "tokenizer": (old.tokenizer.fingerprint[:12], new.tokenizer.fingerprint[:12])
    }
    specs = (old.tokenizer.spec, new.tokenizer.spec)
    pairs |= {key: (specs[0].get(key), specs[1].get(key)) for key in specs[1]}
    old_settings, new_settings = _flatten(old.settings), _flatten(new.settings)
    names = dict.fromkeys([*new_settings, *old_settings])
    pairs |= {
        key: (old_settings.get(key), new_settings.get(key)) for key in names if key != "tokenizer"
    }
    differences = [
        f"{OPTIONS.get(key, key)} was {_format_setting(old_value)}, is {_format_setting(new_value)}"
        for key, (old_value, new_value) in pairs.items()
        if old_value != new_value
    ]
    return "; ".join(differences) or "its format has changed"


def _format_setting(setting: Any) -> str:
    if isinstance(setting, list) and setting and all("name" in item for item in setting):
        return ",".join(str(KeptField(**item)) for item in setting)
    return "not given" if setting is None else str(setting)


def _flatten(settings: dict[str, Any]) -> dict[str, Any]:
    """Move settings of source and template to the top level, where `format` is the shards'."""
    source = dict(settings.get("source", {}))
    chat = {f"chat {key}": value for key, value in (settings.get("chat") or {}).items()}
    chat.pop("chat source", None)  # the text of the template, which has a hash
    flat = {**settings, "source": None, "chat": None, **chat}
    return {**flat, "input_format": source.pop("format", None), **source}


def select_new_files(files: Sequence[File], job: BuildJob, stored_manifest: Manifest) -> list[File]:
    """Return the files that no generation contains; raise InputError for one that has changed since
    it was built."""
    url = dataset_url(job.url, job.outputs[0])
    built_fingerprints: dict[str, str] = {}
    for generation in stored_manifest.generations:
        built_fingerprints.update(_load_inputs(url, generation))
    built_contents = set(built_fingerprints.values())
    unbuilt = []
    for file in files:
        if file.fingerprint in built_contents:
            if file.name not in built_fingerprints:
                log.warning("%s is left out: %s already has its content", file.name, url)
        elif file.name in built_fingerprints:
            raise InputError(
                f"{file.name} has changed since it was built into {url}",
                hint="put new documents in new files, or build at another URL",
            )
        else:
            unbuilt.append(file)
    return unbuilt


def find_missing_shards(job: BuildJob, manifests: dict[str, Manifest]) -> dict[int, set[str]]:
    """Return tasks with shards in a manifest but not in the store, by generation."""
    lost_tasks: dict[int, set[str]] = {}
    for name, dataset_manifest in manifests.items():
        url = dataset_url(job.url, name)
        stored = {
            f"{folder}/{name}"
            for folder in (("shards", *([fields.FOLDER] if job.source.keep else [])))
            if dataset_manifest.generations
            for name in storage.list_files(storage.join(url, folder))
        }
        for number, generation in enumerate(dataset_manifest.generations):
            for shard in manifest.load_table(url, generation):
                files = {shard.stored_name or shard.name}
                if (fields_file := fields.fields_file(shard)) is not None:
                    files.add(fields_file.name)
                if not files <= stored:
                    lost_tasks.setdefault(number, set()).add(shard.task)
    return lost_tasks


def find_generation_files(
    job: BuildJob, output: str, generation: Generation, inputs: Sequence[File]
) -> list[File]:
    """Return the inputs from which a generation was built."""
    url = dataset_url(job.url, output)
    by_content = {(file.name, file.fingerprint): file for file in inputs}
    files = []
    for name, fingerprint in _load_inputs(url, generation).items():
        if (name, fingerprint) not in by_content:
            raise InputError(
                f"{url} lost shards or was not finished, and needs {name} again, which is not "
                "among the inputs or has changed",
                hint="pass the same inputs as when the dataset was built",
            )
        files.append(by_content[name, fingerprint])
    return files


def _load_inputs(url: str, generation: Generation) -> dict[str, str]:
    """Load the names and fingerprints of a generation's input files."""
    data = read_named(url, generation.provenance["inputs"]["name"])
    return {name: fingerprint for name, _, fingerprint in json.loads(data)}
