"""Find the types of kept fields that the user did not name, in the first records of the corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ...console.errors import InputError
from ..files.input_file import DamagedFile, File
from ..sources import corpus_format, cut
from ..sources.fields import EMPTY_LIST, FIELD_KINDS, TEXTUAL, WIDER, FieldKind, element_kind
from ..sources.format import SourceConfig

MOST_FILES = 32
"""Files that are searched for values of a field."""


def with_types(
    config: SourceConfig, files: Sequence[File], known: Mapping[str, FieldKind]
) -> SourceConfig:
    """Return the settings with a type for each kept field: the one given, that of the dataset which
    is built on (`known`), or that of the first values in the corpus."""
    types: dict[str, FieldKind] = {
        field.name: field.type or known[field.name]
        for field in config.keep
        if field.type or field.name in known
    }
    wanted = [field.name for field in config.keep if field.name not in types]
    looked = 0
    for file in files:
        if not wanted or looked == MOST_FILES:
            break
        if "keep" not in corpus_format(file.format).settings:
            continue
        looked += 1
        found: dict[str, set[FieldKind | str]] = {}
        parts = cut(file, config, file.size + 1, skip_bad=True)
        with suppress(DamagedFile):  # reading it reports the damage
            found = corpus_format(file.format).field_kinds(parts[0], wanted) if parts else {}
        for name, kinds in found.items():
            if kinds != {EMPTY_LIST}:  # which says nothing of the elements
                types[name] = _one(name, kinds, file.name)
        wanted = [name for name in wanted if name not in types]
    if wanted:
        raise InputError(
            f"no value for the field `{wanted[0]}` in the first records of {looked} files",
            hint=f"check the name; if the values come later, name their type: {wanted[0]}:float",
        )
    kept = tuple(replace(field, type=types[field.name]) for field in config.keep)
    return replace(config, keep=kept)


def _one(name: str, kinds: set[FieldKind | str], file: str) -> FieldKind:
    """Return the one type of all values of a field; int and float together are float."""
    if any(element_kind(kind) for kind in kinds):
        kinds = kinds - {EMPTY_LIST}
    for narrow, wide in WIDER:
        if kinds == {narrow, wide}:
            kinds = {wide}
    (kind, *others) = sorted(kinds)
    for known in FIELD_KINDS:
        if kind == known and not others:
            return known
    if kind in FIELD_KINDS and set(others) <= set(FIELD_KINDS):
        raise InputError(
            f"the field `{name}` has values of several types: {', '.join(sorted(kinds))}",
            where=file,
            hint=f"name the right one, as in --keep {name}:string; others are bad records then",
        )
    raise InputError(
        f"the field `{name}` holds {', '.join(sorted(kinds))}; a dataset keeps "
        + ", ".join(FIELD_KINDS),
        where=file,
        hint=_other_way(name, kind),
    )


def _other_way(name: str, kind: str) -> str:
    """Return what to do with a field of another type: some can be kept as text."""
    if kind.startswith(TEXTUAL):
        return f"keep it as text: --keep {name}:string"
    if kind == "object" or kind.startswith("struct"):
        return f"name a value inside it, as in --keep {name}.part, or leave it out"
    return "leave it out"
