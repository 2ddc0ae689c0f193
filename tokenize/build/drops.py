"""Check that the drop lists are of this corpus: each must name at least one document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...console.errors import InputError, SeveralErrors
from ...console.log import get_logger
from ...dataplane.datasets.manifest import Manifest
from ..corpus.drop_list import StoredList
from ..corpus.screen import BY_LIST, NAMED_BY
from ..files.input_file import File
from .commit import BuildResult
from .settings import BuildJob

log = get_logger(__name__)


def check_drops(job: BuildJob, files: Sequence[File], made: BuildResult, before: Manifest) -> None:
    """Raise for each list with entries that names no document of the new files, unless earlier
    generations dropped documents: then all lists were checked for them."""
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
    if any(made.provenance["counts"].get(BY_LIST, 0) for made in before.generations):
        return
    if sum(counts[NAMED_BY + each.name] for each in job.drops.lists) < counts[BY_LIST]:
        return  # finished tasks of a killed build counted by other names of the same lists
    errors = [
        _unmatched(each, job, files, counts["documents read"])
        for each in job.drops.lists
        if each.entries and not counts[NAMED_BY + each.name]
    ]
    if errors:
        raise SeveralErrors(errors) if len(errors) > 1 else errors[0]


def _unmatched(drops: StoredList, job: BuildJob, files: Sequence[File], read: int) -> InputError:
    parts = []
    if drops.ids is not None:
        with_ids = job.source.id_field is not None or any(
            file.format in ("fasta", "warc") for file in files
        )
        parts.append("ids" if with_ids else "ids, but the documents have none")
    if drops.records:
        inputs = len({file.fingerprint for file in files} & set(drops.records))
        parts.append(f"records of {len(drops.records):,} inputs, {inputs:,} of them read here")
    return InputError(
        f"the drop list {drops.name} matches no document: {drops.entries:,} entries, {read:,} "
        f"documents read ({'; '.join(parts)})",
        where=drops.name,
        hint="name the field of the corpus' ids with --id-field, or use a list of these inputs",
    )
