"""Check that a drop list is one of this corpus: it must name at least one document."""

from __future__ import annotations

from collections.abc import Sequence

from ...console.errors import InputError
from ...console.log import get_logger
from ...dataplane.datasets.manifest import Manifest
from ..corpus.screen import BY_LIST
from ..files.input_file import File
from .commit import BuildResult
from .settings import BuildJob

log = get_logger(__name__)


def check_drops(
    job: BuildJob, lists: Sequence[str], files: Sequence[File], made: BuildResult, before: Manifest
) -> None:
    """Raise if the list names no document of the new files nor of earlier generations."""
    drops = job.drops
    if drops is None:
        return
    dropped = sum(state.stats.counts[BY_LIST] for state in made.read)
    log.info("drop list: %s entries, %s documents dropped", f"{drops.entries:,}", f"{dropped:,}")
    earlier = sum(made.provenance["counts"].get(BY_LIST, 0) for made in before.generations)
    if dropped or earlier:
        return
    read = sum(state.stats.counts["documents read"] for state in made.read)
    inputs = len({file.fingerprint for file in files} & set(drops.records))
    parts = []
    if drops.ids is not None:
        with_ids = job.source.id_field is not None or any(
            file.format in ("fasta", "warc") for file in files
        )
        parts.append("ids" if with_ids else "ids, but the documents have none")
    if drops.records:
        parts.append(f"records of {len(drops.records):,} inputs, {inputs:,} of them read here")
    raise InputError(
        f"the drop list matches no document: {drops.entries:,} entries, {read:,} documents read "
        f"({'; '.join(parts)})",
        where=", ".join(lists),
        hint="name the field of the corpus' ids with --id-field, or use a list of these inputs",
    )
