"""Mixtures with measured scores, from `scores.json` files by one or several anneals."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...console.errors import InputError, MisuseError
from ...dataplane.arrays import Float64
from ...dataplane.storage import storage
from ...dataplane.storage.faults import AbsentError
from ...dataplane.storage.sealed import check_seal

SCORES_FILE = "scores.json"
MIN_MIXTURES = 4
"""Minimum number of measured mixtures for a regression."""


@dataclass(frozen=True)
class MeasuredMixtures:
    names: Sequence[str]
    """Mixtures, with the place of the anneal if there are several."""
    sources: Sequence[str]
    shares: Float64
    """[mixtures, sources]."""
    scores: Float64
    """[mixtures]; lower is better."""
    error: float
    """Standard error of a score among seeds; 0 if unknown."""

    @property
    def best(self) -> int:
        """Index of the mixture with the lowest score."""
        return int(self.scores.argmin())


def load_scores(places: Sequence[str]) -> MeasuredMixtures:
    """Load scores from anneals, which must weigh the same sources alike."""
    entries, errors = [], []
    weights: dict[str, float] | None = None
    for place in places:
        file = place if place.endswith(".json") else storage.join(place, SCORES_FILE)
        try:
            ranking = _read(file)
        except AbsentError:
            raise _missing_scores_error(place) from None
        if weights is not None and ranking["weights"] != weights:
            raise MisuseError(
                f"{file} has scores of other sources or weights than {places[0]}",
                where=f"{ranking['weights']} and {weights}",
                hint="rank both alike: trainer anneal … --report --score SOURCE=WEIGHT",
            )
        weights = ranking["weights"]
        entries += [(place, entry) for entry in ranking["candidates"]]
        errors += [entry["error"] for entry in ranking["candidates"] if entry["error"] is not None]
    finite = [(place, entry) for place, entry in entries if math.isfinite(entry["score"])]
    if len(finite) < MIN_MIXTURES:
        raise InputError(
            f"{len(finite)} mixtures have a score; a regression needs {MIN_MIXTURES}",
            hint="measure more with `trainer anneal`, such as --grid SOURCE=0.1,0.2,0.4",
        )
    sources = list(dict.fromkeys(name for _, entry in finite for name in entry["shares"]))
    shares = [[entry["shares"].get(name, 0.0) for name in sources] for _, entry in finite]
    label_places = len(places) > 1
    return MeasuredMixtures(
        names=[
            f"{place}: {entry['name']}" if label_places else entry["name"]
            for place, entry in finite
        ],
        sources=sources,
        shares=np.array(shares, np.float64),
        scores=np.array([entry["score"] for _, entry in finite], np.float64),
        error=float(np.median(errors)) if errors else 0.0,
    )


def _missing_scores_error(place: str) -> InputError:
    """Explain a place without a ranking: an unfinished anneal, a run, or no folder."""
    anneal = f"{place.rstrip('/')}-anneal"
    hint = "name the folder of a `trainer anneal`, by default RUN-anneal"
    if storage.exists(storage.join(place, "anneal.json")):
        hint = "rank its mixtures first: run the same `trainer anneal` to its end"
    elif storage.exists(storage.join(anneal, SCORES_FILE)):
        hint = f"did you mean {anneal}?"
    elif storage.exists(storage.join(place, "run.yaml")):
        hint = f"{place} is a run: `trainer anneal {place}` measures mixtures, in {anneal}"
    return InputError(f"{place} has no scores of mixtures ({SCORES_FILE})", hint=hint)


def _read(file: str) -> dict[str, Any]:
    try:
        ranking: dict[str, Any] = json.loads(storage.read(file))
        for entry in ranking["candidates"]:
            entry["score"], entry["shares"], entry["name"], entry["error"]
        ranking["weights"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file} is not a ranking of `trainer anneal` ({type(error).__name__}: {error})",
            hint=f"name the folder of an anneal, or its {SCORES_FILE}",
        ) from None
    check_seal(file, ranking, hint="rank the anneal again: `trainer anneal … --report`")
    return ranking
