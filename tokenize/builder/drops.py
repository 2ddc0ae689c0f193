"""Check that the drop lists are of this corpus: each must name at least one document, and each
record that a list names must be there if its input is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...console.errors import InputError, SeveralErrors
from ...console.log import get_logger
from ...dataplane.datasets.manifest import Manifest
from ..corpus.drop_list import DropList, StoredList
from ..corpus.screen import BY_LIST, NAMED_BY
from ..files.input_file import File
from ..sources import corpus_format
from ..sources.format import SourceConfig
from .commit import BuildResult
from .settings import BuildJob

log = get_logger(__name__)


def check_ids(drops: Sequence[DropList], files: Sequence[File], source: SourceConfig) -> None:
    """Raise for lists of ids if the documents of these files have none."""
    if source.id_field is not None or any(corpus_format(file.format).has_ids for file in files):
        return
    _raise_all(
        [
            InputError(
                f"the drop list {each.name} has ids, but the documents have none",
                where=each.name,
                hint="name the field of the corpus' ids with --id-field, or use a list of inputs "
                "and records, as `tokenize neardup` writes it",
            )
            for each in drops
            if each.ids
        ]
    )


def check_drops(job: BuildJob, files: Sequence[File], made: BuildResult, before: Manifest) -> None:
    """Raise for each list that names records of the new files which are not there.

    Raise also for each list with entries that names no document of them, unless earlier
    generations dropped documents: then all lists were checked for them.
    """
    if job.drops is None:
        return
    counts: Counter[str] = sum((state.stats.counts for state in made.read), Counter())
    for each in job.drops.lists:
        named = counts[NAMED_BY + each.name]
        log.info(
            "drop list %s: %s entries, %s documents dropped",
            each.name,
            f"{each.entries:,}",
            f"{named:,}",
        )
    if sum(counts[NAMED_BY + each.name] for each in job.drops.lists) < counts[BY_LIST]:
        return  # finished tasks of a killed build counted by other names of the same lists
    left_out = counts["empty documents"] + sum(state.stats.bad for state in made.read)
    before_dropped = any(made.provenance["counts"].get(BY_LIST, 0) for made in before.generations)
    errors = []
    for each in job.drops.lists:
        named = counts[NAMED_BY + each.name]
        here = sum(each.counts.get(file.fingerprint, 0) for file in files)
        if each.entries and not named and not before_dropped:
            errors.append(_unmatched(each, files, counts["documents read"]))
        elif named + left_out < here:
            errors.append(_absent(each, here, named))
    _raise_all(errors)


def _absent(drops: StoredList, here: int, named: int) -> InputError:
    return InputError(
        f"the drop list {drops.name} names {here:,} records of the inputs, and {here - named:,} of "
        "them are not there",
        where=drops.name,
        hint="make the list again from these inputs (`tokenize neardup`), or restore it from a "
        "copy",
    )


def _unmatched(drops: StoredList, files: Sequence[File], read: int) -> InputError:
    parts = [] if drops.ids is None else ["ids"]
    if drops.records:
        inputs = len({file.fingerprint for file in files} & set(drops.records))
        parts.append(f"records of {len(drops.records):,} inputs, {inputs:,} of them read here")
    return InputError(
        f"the drop list {drops.name} matches no document: {drops.entries:,} entries, {read:,} "
        f"documents read ({'; '.join(parts)})",
        where=drops.name,
        hint="name the field of the corpus' ids with --id-field, or use a list of these inputs",
    )


def _raise_all(errors: Sequence[InputError]) -> None:
    if errors:
        raise SeveralErrors(errors) if len(errors) > 1 else errors[0]
