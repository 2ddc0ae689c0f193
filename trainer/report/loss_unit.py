"""Unit of the losses of several runs: nats per token, or bits per byte if tokenizers differ.

A token of another tokenizer is another piece of text, so losses per token cannot be subtracted. The
bytes per token of each source are those of its dataset: of all its tokens, or of SPANS spans of it
if it is large. A step's bits per byte follow from its loss and from the weights of its sources.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...console.errors import UserError
from ...dataplane import tokenizers
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.order.plan import Plan, PlanSource
from .data import RunData
from .page import NATS

BITS = "bits per byte"
CONVERTED = (
    "These runs have different tokenizers: losses are in bits per byte of text, with the bytes per "
    "token of each source's dataset."
)
INCOMPARABLE = (
    "These runs have different tokenizers, and bits per byte need their datasets ({}). Losses in "
    "nats per token of different tokenizers cannot be compared."
)
SPANS, SPAN_TOKENS = 256, 8192

BytesPerToken = dict[str, float]
"""Bytes per token of each source, by name."""


def in_one_unit(runs: Sequence[RunData]) -> tuple[list[RunData], str | None, str | None]:
    """Return the runs with losses in one unit, the unit, and a note about it.

    The unit is None if the tokenizers differ and a dataset cannot be read: the losses of the runs
    stay as they are and cannot be compared.
    """
    if len({_tokenizer(run) for run in runs}) == 1:
        return list(runs), NATS, None
    try:
        return [_in_bits(run) for run in runs], BITS, CONVERTED
    except UserError as error:
        return list(runs), None, INCOMPARABLE.format(error.what)


def _tokenizer(run: RunData) -> str:
    """Return what identifies the tokens of a run."""
    plan = run.job.plan
    return plan.tokenizer if isinstance(plan, Plan) else f"synthetic {plan.vocab_size}"


def _in_bits(run: RunData) -> RunData:
    plan = run.job.plan
    if not isinstance(plan, Plan):
        raise UserError(f"the rows of {run.name} are synthetic and have no bytes")
    drawn = {name for entry in run.metrics for name in entry["sources"]}
    trained = bytes_per_token(source for source in plan.sources if source.name in drawn)
    held_out: BytesPerToken = {}
    if run.evaluations and run.job.run.evaluate is not None:
        held_out = bytes_per_token(Plan.load(run.job.held_out).sources)
    return replace(
        run,
        metrics=[_converted(entry, trained) for entry in run.metrics],
        evaluations=[_converted(entry, held_out) for entry in run.evaluations],
    )


def _converted(entry: dict[str, Any], sizes: BytesPerToken) -> dict[str, Any]:
    """Return a line of metrics or of evaluations with its losses in bits per byte."""
    sources = entry["sources"]
    tokens = sum(source["weight"] for source in sources.values())
    octets = sum(source["weight"] * sizes[name] for name, source in sources.items())
    return {
        **entry,
        "loss": _bits(entry["loss"], octets / tokens if tokens else math.nan),
        "sources": {
            name: {**source, "loss": _bits(source["loss"], sizes[name])}
            for name, source in sources.items()
        },
    }


def bits_per_byte(nats: float, size: float) -> float:
    """Return a loss per token in bits per byte; `size` is the bytes of a token."""
    return nats / math.log(2) / size


def _bits(nats: float | None, size: float) -> float | None:
    return None if nats is None else bits_per_byte(nats, size)


def bytes_per_token(sources: Iterable[PlanSource]) -> BytesPerToken:
    """Return the bytes per token of each source's dataset."""
    return {source.name: measure(source.url) for source in sources}


def measure(url: str) -> float:
    """Return the mean bytes of a dataset's tokens; the ends of documents have none."""
    dataset = Dataset(url)
    sizes = tokenizers.load(dataset.manifest.tokenizer, url).byte_sizes()
    total = int(dataset.shard_tokens[-1])
    length = total if total <= SPANS * SPAN_TOKENS else SPAN_TOKENS
    starts = np.unique(np.linspace(0, total - length, SPANS).astype(np.int64))
    octets = 0
    ids = np.empty(length, dataset.manifest.dtype)
    for start in starts.tolist():
        dataset.fill(start, ids)
        octets += int(sizes[ids].sum())
    if not octets:
        raise UserError(f"the tokens of {url} have no bytes")
    return octets / (len(starts) * length)
