"""Mixtures with measured scores: the `scores.json` of `trainer anneal`, of one or several."""

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

NAME = "scores.json"
LEAST = 4
"""Fewest measured mixtures that a regression is fitted to."""


@dataclass(frozen=True)
class Measured:
    names: Sequence[str]
    """Names of the mixtures."""
    sources: Sequence[str]
    shares: Float64
    """[mixtures, sources]."""
    scores: Float64
    """[mixtures]; less is better."""
    error: float
    """Standard error of a score among seeds; 0 if it is not known."""

    @property
    def best(self) -> int:
        return int(self.scores.argmin())


def load(places: Sequence[str]) -> Measured:
    """Load the scores of anneals, whose candidates are scored alike."""
    entries, errors = [], []
    weights: dict[str, float] | None = None
    for place in places:
        file = place if place.endswith(".json") else storage.join(place, NAME)
        try:
            found = _read(file)
        except AbsentError:
            raise _no_anneal(place) from None
        if weights is not None and found["weights"] != weights:
            raise MisuseError(
                f"{file} has scores of other sources or weights than {places[0]}",
                where=f"{found['weights']} and {weights}",
                hint="rank both alike: trainer anneal … --report --score SOURCE=WEIGHT",
            )
        weights = found["weights"]
        entries += [(place, entry) for entry in found["candidates"]]
        errors += [entry["error"] for entry in found["candidates"] if entry["error"] is not None]
    finite = [(place, entry) for place, entry in entries if math.isfinite(entry["score"])]
    if len(finite) < LEAST:
        raise InputError(
            f"{len(finite)} mixtures have a score; a regression needs {LEAST}",
            hint="measure more with `trainer anneal`, such as --grid SOURCE=0.1,0.2,0.4",
        )
    sources = list(dict.fromkeys(name for _, entry in finite for name in entry["shares"]))
    shares = [[entry["shares"].get(name, 0.0) for name in sources] for _, entry in finite]
    many = len(places) > 1
    return Measured(
        names=[f"{place}: {entry['name']}" if many else entry["name"] for place, entry in finite],
        sources=sources,
        shares=np.array(shares, np.float64),
        scores=np.array([entry["score"] for _, entry in finite], np.float64),
        error=float(np.median(errors)) if errors else 0.0,
    )


def _no_anneal(place: str) -> InputError:
    """Return the error for a place without a ranking: an anneal that goes on, a run, no folder."""
    beside = f"{place.rstrip('/')}-anneal"
    hint = "name the folder of a `trainer anneal`, by default RUN-anneal"
    if storage.exists(storage.join(place, "anneal.json")):
        hint = "rank its mixtures first: run the same `trainer anneal` to its end"
    elif storage.exists(storage.join(beside, NAME)):
        hint = f"did you mean {beside}?"
    elif storage.exists(storage.join(place, "run.yaml")):
        hint = f"{place} is a run: `trainer anneal {place}` measures mixtures, in {beside}"
    return InputError(f"{place} has no scores of mixtures ({NAME})", hint=hint)


def _read(file: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(storage.read(file))
        for entry in found["candidates"]:
            entry["score"], entry["shares"], entry["name"], entry["error"]
        found["weights"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file} is not a ranking of `trainer anneal` ({type(error).__name__}: {error})",
            hint=f"name the folder of an anneal, or its {NAME}",
        ) from None
    check_seal(file, found, hint="rank the anneal again: `trainer anneal … --report`")
    return found
