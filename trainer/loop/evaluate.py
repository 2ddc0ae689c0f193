"""Evaluation: the loss on held-out rows, by source, at intervals.

    data/web/train ─ the mixture        data/web/val ─ a plan of its own, the same rows each time
    a view of data/web/train            the same view of data/web/val, or else data/web/val

Evaluation reads a plan as training does, with a phase of one step per source, so ranks divide the
rows in the same way. It changes neither weights nor the stream, random state or ledger.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...console.errors import PlanError
from ..layout.schedules import forward_only
from .batches import MicroBatch, RunPlan
from .config import EvaluateConfig

if TYPE_CHECKING:
    import torch

    from ...dataplane.order.plan import Plan
    from ..engines.engine import Engine
    from ..layout.groups import Parallel
    from .step_stats import StepStats

TRAIN = "train"


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    names: Sequence[str]
    stats: StepStats
    seconds: float


class Evaluator:
    """Evaluates an engine on a plan's rows."""

    def __init__(
        self,
        plan: Plan,
        steps: Iterable[Sequence[MicroBatch]],
        parallel: Parallel,
        every: int,
    ) -> None:
        """Each iteration over `steps` yields this rank's micro-batches, step by step."""
        self.names = [source.name for source in plan.sources]
        self.rows = range(plan.first_row, plan.end_row)
        self.steps = steps
        self.parallel = parallel
        self.every = every

    def __call__(self, engine: Engine) -> Evaluation:
        """Evaluate the current weights. Collective."""
        import torch

        from .execute import execute
        from .step_stats import gather

        began = time.perf_counter()
        batches: list[MicroBatch] = []
        losses: list[torch.Tensor] = []
        engine.objective.eval()
        try:
            with torch.no_grad():
                for step in self.steps:
                    orders = forward_only(self.parallel.pipe.orders(len(step)))
                    losses += execute(orders, step, engine, self.parallel)
                    batches += step
        finally:
            engine.objective.train()
        divisor = engine.objective.divisor
        stats = gather(batches, losses, len(self.names), self.rows, self.parallel, divisor)
        return Evaluation(self.names, stats, time.perf_counter() - began)


def held_out_datasets(config: EvaluateConfig, plan: Plan) -> dict[str, str]:
    """Return URLs of held-out datasets by name, without duplicates."""
    if config.sources:
        return dict(config.sources)
    length = row_length(config, plan)
    candidates = {
        source.name: find_held_out(source.url, config.split, length) for source in plan.sources
    }
    urls = distinct_datasets({name: url for name, url in candidates.items() if url is not None})
    if not urls:
        raise PlanError(
            f"evaluate is set, and no source of the mixture has a `{config.split}` beside it",
            hint=f"build the datasets with `tokenize build --split {config.split}=0.01` and name "
            f"their `…/{TRAIN}` in the mixture, or name datasets: evaluate.sources.NAME=URL",
        )
    return urls


def distinct_datasets(urls: Mapping[str, str]) -> dict[str, str]:
    """Drop datasets that share a generation with an earlier dataset."""
    datasets: dict[str, str] = {}
    seen: set[str] = set()
    for name, url in urls.items():
        if seen.isdisjoint(hashes := _generation_hashes(url)):
            seen |= hashes
            datasets[name] = url
    return datasets


def row_length(config: EvaluateConfig, plan: Plan) -> int:
    """Return the number of tokens per evaluated row."""
    return config.seq_len or min(phase.seq_len for phase in plan.phases)


def find_held_out(url: str, split: str, length: int) -> str | None:
    """Return the URL of a training dataset's held-out split, or None.

    In the URL, the split replaces the last `train`: `web/val` for `web/train`, `web/val/packed-512`
    for `web/train/packed-512`. If a view has no such split, or if a packed view's bins do not fill
    rows with `length` tokens, the split of the view's base dataset is taken: the same documents in
    another layout, or all documents where the view has some.
    """
    from ...dataplane.datasets import manifest as manifests
    from ...dataplane.datasets.packing import bin_length
    from ...dataplane.datasets.view import parse_view
    from ...dataplane.storage import storage

    folders = url.rstrip("/").split("/")
    if TRAIN in folders:
        last = len(folders) - 1 - folders[::-1].index(TRAIN)
        candidate = "/".join([*folders[:last], split, *folders[last + 1 :]])
        if storage.exists(storage.join(candidate, manifests.NAME)):
            bins = bin_length(manifests.load(candidate))
            if bins is None or length % bins == 0:
                return candidate
    view = parse_view(url, manifests.load(url))
    return None if view is None else find_held_out(view.url, split, length)


def _generation_hashes(url: str) -> set[str]:
    """Return the hashes of a dataset's generations. Two datasets that share a hash are equal."""
    from ...dataplane.datasets import manifest as manifests

    return {generation.hash for generation in manifests.load(url).generations}


def unnamed_sources(
    config: EvaluateConfig, trained: RunPlan, urls: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the mixture's sources that `urls` does not name. The value is the name under which a
    source's held-out rows are evaluated, or None if there are no such rows. With configured
    datasets (`evaluate.sources`), no source is missing."""
    from ...dataplane.order.plan import Plan

    if config.sources or not isinstance(trained, Plan):
        return {}
    length = row_length(config, trained)
    sources = [source for source in trained.sources if source.name not in urls]
    names_by_hash: dict[str, str] = {}
    if sources:
        names_by_hash = {h: name for name, url in urls.items() for h in _generation_hashes(url)}
    names: dict[str, str | None] = {}
    for source in sources:
        url = find_held_out(source.url, config.split, length)
        hashes = set() if url is None else _generation_hashes(url)
        names[source.name] = next((names_by_hash[h] for h in hashes if h in names_by_hash), None)
    return names


def missing_note(names: Sequence[str], split: str) -> str:
    return (
        f"no held-out rows of {', '.join(names)}: there is no `{split}` beside "
        f"{'its dataset' if len(names) == 1 else 'their datasets'} "
        f"(`tokenize build --split {split}=0.01`)"
    )


def plan_held_out(config: EvaluateConfig, trained: RunPlan) -> Plan:
    """Plan the held-out rows: a phase of one step per source."""
    from ...console import config as reader
    from ...dataplane.datasets import manifest as manifests
    from ...dataplane.order.plan import Plan
    from ...mixtures.mixture_file.mixture import Mixture
    from ...mixtures.planning.resolve_mixture import resolve

    if not isinstance(trained, Plan):
        raise PlanError(
            "evaluate needs a mixture: synthetic rows have no held-out split",
            hint="remove evaluate, or give --mixture FILE.yaml",
        )
    length = row_length(config, trained)
    sources = held_out_datasets(config, trained)
    phases = {}
    for name, url in sources.items():
        rows = min(config.rows, (manifests.load(url).tokens - 1) // length)
        if rows < 1:
            raise PlanError(
                f"{url} has too few tokens to evaluate on a row of {length:,}",
                hint="hold out more, or set a shorter evaluate.seq_len",
            )
        tokens = rows * length
        phases[f"evaluate {name}"] = {
            "tokens": tokens,
            "seq_len": length,
            "batch": tokens,
            "weights": {name: 1},
        }
    spec = {
        "isolate_documents": trained.isolate_documents,
        "sources": {name: {"data": url} for name, url in sources.items()},
        "phases": phases,
    }
    evaluation = resolve(reader.build(Mixture, spec, source="evaluate"))
    if evaluation.tokenizer != trained.tokenizer:
        raise PlanError(
            "the held-out datasets were built with another tokenizer than the mixture",
            hint="hold out a split of the mixture's own datasets, or build one with its tokenizer",
        )
    return evaluation
