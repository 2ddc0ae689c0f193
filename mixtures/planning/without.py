"""Documents that a run reads but does not learn: their tokens have no weight in the loss.

Every row stays in its place, to the bit, so that two runs with and without some documents differ in
nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...console.log import get_logger
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.order.epochs.remainder import merge_spans
from ...dataplane.order.plan import PlanSource
from ..mixture_file.check import MixtureFinding
from .id_list import read_ids
from .open_sources import OpenedSource

log = get_logger(__name__)

TokenSpans = tuple[tuple[int, int], ...]
"""Token ranges [start, end) of a dataset, sorted."""


def find_unlearnt(
    lists: Sequence[str], opened: Mapping[str, OpenedSource]
) -> dict[str, TokenSpans]:
    """Find the tokens of the listed documents, by source."""
    ids = {id for file in lists for id in read_ids(file)}
    unlearnt: dict[str, TokenSpans] = {}
    unknown = set(ids)
    for name, source in (opened if ids else {}).items():
        spans, known = _find_spans(name, source, ids)
        unknown -= known
        if spans:
            unlearnt[name] = spans
    if unlearnt and unknown:
        log.warning(
            "`without`: %d of %d ids are in no source, such as %s",
            len(unknown),
            len(ids),
            min(unknown),
        )
    return unlearnt


def check_unlearnt(
    lists: Sequence[str], unlearnt: Mapping[str, TokenSpans]
) -> list[MixtureFinding]:
    """Report lists that name no document: what should not be learnt would be learnt."""
    if lists and not unlearnt:
        return [MixtureFinding(("without",), "names no document of any source")]
    return []


def warn_learnt_again(
    lists: Sequence[str], before: Sequence[PlanSource], opened: Mapping[str, OpenedSource]
) -> None:
    """Warn if a mixture without lists continues a run that has some: it learns their documents."""
    names = [source.name for source in before if source.unlearnt and source.name in opened]
    if names and not lists:
        log.warning(
            "the run has documents of %s without loss (`without`), and this mixture learns them: "
            "name the lists again to leave them out",
            ", ".join(names),
        )


def _find_spans(name: str, source: OpenedSource, ids: set[str]) -> tuple[TokenSpans, set[str]]:
    """Return the tokens of the listed documents of a source, and the ids that it has."""
    dataset = Dataset(source.spec.data, generations=len(source.generations))
    if not dataset.has_ids:
        log.warning("`without` finds no document of %s: they have no ids", name)
        return (), set()
    matches = list(dataset.find_ids(ids))
    if not matches:
        return (), set()
    numbers = np.array([number for number, _ in matches], np.int64)
    spans = merge_spans(np.stack(dataset.document_spans(numbers), axis=1))
    known = {str(origin.id) for _, origin in matches}
    return tuple((start, end) for start, end in spans.tolist()), known
