"""Find a run's tokenizer in its datasets."""

from __future__ import annotations

from ...console.errors import CheckpointError, UserError
from ...dataplane import tokenizers
from ...dataplane.datasets import manifest as manifests
from ...dataplane.order.plan import Plan
from ...dataplane.tokenizers import Tokenizer
from ..folders.folder import RunFolder
from .source import Checkpoint, WeightSource


def find_tokenizer(source: WeightSource, data: str | None) -> Tokenizer:
    """Load the tokenizer from the dataset `data`, or from the run that saved the weights."""
    return find_dataset(source, data)[1]


def find_dataset(source: WeightSource, data: str | None) -> tuple[str, Tokenizer]:
    """Return URL and tokenizer of the dataset `data`, or of a dataset that the run reads."""
    if data is not None:
        return data, load_tokenizer(data)
    return find_run_dataset(source.run if isinstance(source, Checkpoint) else None)


def load_tokenizer(url: str) -> Tokenizer:
    return tokenizers.load(manifests.load(url).tokenizer, url)


def find_run_dataset(run: RunFolder | None) -> tuple[str, Tokenizer]:
    """Return URL and tokenizer of the first readable source; all sources share a tokenizer."""
    if run is None or not run.plan.exists():
        raise CheckpointError(
            "there is no tokenizer: the weights are not of a run with datasets"
            + (f" ({run.root} has no {run.plan.name})" if run else ""),
            hint="name a dataset that was built with the same tokenizer: --data URL",
        )
    failures = []
    for source in Plan.load(run.plan).sources:
        try:
            return source.url, load_tokenizer(source.url)
        except UserError as error:
            failures.append(f"{source.name}: {error.message}")
    raise CheckpointError(
        "the tokenizer cannot be read from any source of the run",
        where="\n" + "\n".join(f"    {line}" for line in failures),
        hint="name a dataset that was built with the same tokenizer: --data URL",
    )
