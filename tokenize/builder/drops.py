"""Check that drop lists fit the corpus: every list must name at least one document, and every named
record must exist if its input is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...console.errors import InputError, SeveralErrors
from ...console.log import get_logger
from ...console.progress import exact_count
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
    """Raise if lists name ids and documents in these files have none."""
    if source.id_field is not None or any(corpus_format(file.format).has_ids for file in files):
        return
    _raise_all(
        [
            InputError(
                f"the drop list {drop_list.name} has ids, but the documents have none",
                where=drop_list.name,
                hint="name the field of the corpus' ids with --id-field, or use a list of inputs "
                "and records, as `tokenize neardup` writes it",
            )
            for drop_list in drops
            if drop_list.ids
        ]
    )


def check_drops(
    job: BuildJob, files: Sequence[File], result: BuildResult, manifest: Manifest
) -> None:
    """Raise for lists that name missing records in the new files.

    Raise also for lists with entries that name no document in the new files, unless earlier
    generations dropped documents: then all lists were checked already.
    """
    if job.drops is None:
        return
    counts: Counter[str] = sum((state.stats.counts for state in result.read), Counter())
    for drop_list in job.drops.lists:
        num_named = counts[NAMED_BY + drop_list.name]
        log.info(
            "drop list %s: %s entries, %s documents dropped",
            drop_list.name,
            f"{drop_list.entries:,}",
            f"{num_named:,}",
        )
    if sum(counts[NAMED_BY + drop_list.name] for drop_list in job.drops.lists) < counts[BY_LIST]:
        return  # finished tasks of a killed build counted by other names of the same lists
    num_left_out = counts["empty documents"] + sum(state.stats.bad for state in result.read)
    dropped_earlier = any(
        generation.provenance["counts"].get(BY_LIST, 0) for generation in manifest.generations
    )
    errors = []
    for drop_list in job.drops.lists:
        num_named = counts[NAMED_BY + drop_list.name]
        num_records = sum(drop_list.counts.get(file.fingerprint, 0) for file in files)
        if drop_list.entries and not num_named and not dropped_earlier:
            errors.append(_no_match_error(drop_list, files, counts["documents read"]))
        elif num_named + num_left_out < num_records:
            errors.append(_missing_records_error(drop_list, num_records, num_named))
    _raise_all(errors)


def _missing_records_error(drop_list: StoredList, num_records: int, num_named: int) -> InputError:
    return InputError(
        f"the drop list {drop_list.name} names "
        f"{exact_count(num_records, 'records')} of the inputs, and "
        f"{num_records - num_named:,} of them are not there",
        where=drop_list.name,
        hint="make the list again from these inputs (`tokenize neardup`), or restore it from a "
        "copy",
    )


def _no_match_error(drop_list: StoredList, files: Sequence[File], num_read: int) -> InputError:
    contents = [] if drop_list.ids is None else ["ids"]
    if drop_list.records:
        inputs = len({file.fingerprint for file in files} & set(drop_list.records))
        contents.append(
            f"records of {exact_count(len(drop_list.records), 'inputs')}, "
            f"{inputs:,} of them read here"
        )
    return InputError(
        f"the drop list {drop_list.name} matches no document: {drop_list.entries:,} entries, "
        f"{exact_count(num_read, 'documents')} read ({'; '.join(contents)})",
        where=drop_list.name,
        hint="name the field of the corpus' ids with --id-field, or use a list of these inputs",
    )


def _raise_all(errors: Sequence[InputError]) -> None:
    if errors:
        raise SeveralErrors(errors) if len(errors) > 1 else errors[0]
