"""Find types for kept fields whose type the user did not name, in the corpus's first records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ...console.errors import InputError
from ..files.input_file import DamagedFile, File
from ..sources import corpus_format, cut
from ..sources.fields import (
    EMPTY_LIST,
    FIELD_KINDS,
    TEXT_TYPE_PREFIXES,
    WIDENINGS,
    FieldKind,
    element_kind,
)
from ..sources.format import SourceConfig

MAX_FILES = 32
"""Files searched for a field's values."""


def resolve_types(
    config: SourceConfig, files: Sequence[File], known: Mapping[str, FieldKind]
) -> SourceConfig:
    """Return the settings with a type for every kept field.

    The type is the user's, else that of the dataset which the build extends (`known`), else that of
    the first values in the corpus.
    """
    types: dict[str, FieldKind] = {
        field.name: field.type or known[field.name]
        for field in config.keep
        if field.type or field.name in known
    }
    untyped = [field.name for field in config.keep if field.name not in types]
    num_searched = 0
    for file in files:
        if not untyped or num_searched == MAX_FILES:
            break
        if "keep" not in corpus_format(file.format).settings:
            continue
        num_searched += 1
        kinds_by_name: dict[str, set[FieldKind | str]] = {}
        slices = cut(file, config, file.size + 1, skip_bad=True)
        with suppress(DamagedFile):  # reading it reports the damage
            kinds_by_name = (
                corpus_format(file.format).field_kinds(slices[0], untyped) if slices else {}
            )
        for name, kinds in kinds_by_name.items():
            if kinds != {EMPTY_LIST}:  # which says nothing of the elements
                types[name] = _common_kind(name, kinds, file.name)
        untyped = [name for name in untyped if name not in types]
    if untyped:
        raise InputError(
            f"no value for the field `{untyped[0]}` in the first records of {num_searched} files",
            hint=f"check the name; if the values come later, name their type: {untyped[0]}:float",
        )
    kept = tuple(replace(field, type=types[field.name]) for field in config.keep)
    return replace(config, keep=kept)


def _common_kind(name: str, kinds: set[FieldKind | str], file: str) -> FieldKind:
    """Return the type that all values of a field share; int and float together are float."""
    if any(element_kind(kind) for kind in kinds):
        kinds = kinds - {EMPTY_LIST}
    for narrow, wide in WIDENINGS:
        if kinds == {narrow, wide}:
            kinds = {wide}
    (kind, *other_kinds) = sorted(kinds)
    for field_kind in FIELD_KINDS:
        if kind == field_kind and not other_kinds:
            return field_kind
    if kind in FIELD_KINDS and set(other_kinds) <= set(FIELD_KINDS):
        raise InputError(
            f"the field `{name}` has values of several types: {', '.join(sorted(kinds))}",
            where=file,
            hint=f"name the right one, as in --keep {name}:string; others are bad records then",
        )
    raise InputError(
        f"the field `{name}` holds {', '.join(sorted(kinds))}; a dataset keeps "
        + ", ".join(FIELD_KINDS),
        where=file,
        hint=_unsupported_hint(name, kind),
    )


def _unsupported_hint(name: str, kind: str) -> str:
    """Return the hint for a type that cannot be kept."""
    if kind.startswith(TEXT_TYPE_PREFIXES):
        return f"keep it as text: --keep {name}:string"
    if kind == "object" or kind.startswith("struct"):
        return f"name a value inside it, as in --keep {name}.part, or leave it out"
    return "leave it out"
