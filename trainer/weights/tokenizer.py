"""The tokenizer of a run: its datasets have it."""

from __future__ import annotations

from ...console.errors import CheckpointError, UserError
from ...dataplane import tokenizers
from ...dataplane.datasets import manifest as manifests
from ...dataplane.order.plan import Plan
from ...dataplane.tokenizers import Tokenizer
from ..folder import RunFolder
from .source import Checkpoint, WeightSource


def of(origin: WeightSource, data: str | None) -> Tokenizer:
    """That of a dataset, if one is named, or of the run that the weights are from."""
    if data is not None:
        return of_dataset(data)
    return of_run(origin.run if isinstance(origin, Checkpoint) else None)


def of_dataset(url: str) -> Tokenizer:
    return tokenizers.load(manifests.load(url).tokenizer, url)


def of_run(run: RunFolder | None) -> Tokenizer:
    """All sources of a run have one tokenizer: that of the first which can be read."""
    if run is None or not run.plan.exists():
        raise CheckpointError(
            "nothing here says what the ids mean: there are no datasets"
            + (f" in {run.root}" if run else ""),
            hint="name a dataset that was made with the same tokenizer: --data URL",
        )
    failures = []
    for source in Plan.load(run.plan).sources:
        try:
            return of_dataset(source.url)
        except UserError as error:
            failures.append(f"{source.name}: {error.what}")
    raise CheckpointError(
        "the tokenizer cannot be read from any source of the run",
        where="\n" + "\n".join(f"    {line}" for line in failures),
        hint="name a dataset that was made with the same tokenizer: --data URL",
    )
