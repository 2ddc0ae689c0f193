"""Evaluation: the loss on held-out rows, by source, at intervals.

    data/web/train ─ the mixture        data/web/val ─ a plan of its own, the same rows each time
    a view of data/web/train            the same view of data/web/val, or else data/web/val

Evaluation reads by a plan as training does, with one phase of one step for each source, so ranks
divide the rows in the same way. It changes neither weights nor the stream, random state or ledger.
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
    """Result of one evaluation."""

    names: Sequence[str]
    stats: StepStats
    seconds: float


class Evaluator:
    """Evaluate an engine on the rows of a plan."""

    def __init__(
        self,
        plan: Plan,
        steps: Iterable[Sequence[MicroBatch]],
        parallel: Parallel,
        every: int,
    ) -> None:
        """Each iteration over `steps` yields this rank's micro-batches of every step."""
        self.names = [source.name for source in plan.sources]
        self.rows = range(plan.first_row, plan.end_row)
        self.steps = steps
        self.parallel = parallel
        self.every = every

    def __call__(self, engine: Engine) -> Evaluation:
        """Return the loss of the present weights. Collective."""
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


def held_out(config: EvaluateConfig, plan: Plan) -> dict[str, str]:
    """Return the datasets to evaluate on, by name; sources that share one have it once."""
    if config.sources:
        return dict(config.sources)
    length = length_of(config, plan)
    counterparts = {
        source.name: counterpart(source.url, config.split, length) for source in plan.sources
    }
    urls = distinct({name: url for name, url in counterparts.items() if url is not None})
    if not urls:
        raise PlanError(
            f"evaluate is set, and no source of the mixture has a `{config.split}` beside it",
            hint=f"build the datasets with `tokenize build --split {config.split}=0.01` and name "
            f"their `…/{TRAIN}` in the mixture, or name datasets: evaluate.sources.NAME=URL",
        )
    return urls


def distinct(urls: Mapping[str, str]) -> dict[str, str]:
    """Return the datasets of which none is the same as one before it."""
    kept: dict[str, str] = {}
    known: set[str] = set()
    for name, url in urls.items():
        if known.isdisjoint(hashes := _hashes(url)):
            known |= hashes
            kept[name] = url
    return kept


def length_of(config: EvaluateConfig, plan: Plan) -> int:
    """Return the tokens of a row to evaluate on."""
    return config.seq_len or min(phase.seq_len for phase in plan.phases)


def counterpart(url: str, split: str, length: int) -> str | None:
    """Return the dataset that was held out from one, or None.

    It has the same URL, with the split in place of the last `train`: `web/val` of `web/train`, and
    `web/val/packed-512` of `web/train/packed-512`. A view without one has that of its dataset, and
    so has a packed view whose bins do not fill rows of this length: the same documents in another
    layout, or all documents where the view has some.
    """
    from ...dataplane.datasets import manifest as manifests
    from ...dataplane.datasets.packing import length_of as bin_length
    from ...dataplane.datasets.view import view_of
    from ...dataplane.storage import storage

    parts = url.rstrip("/").split("/")
    if TRAIN in parts:
        last = len(parts) - 1 - parts[::-1].index(TRAIN)
        candidate = "/".join([*parts[:last], split, *parts[last + 1 :]])
        if storage.exists(storage.join(candidate, manifests.NAME)):
            bins = bin_length(manifests.load(candidate))
            if bins is None or length % bins == 0:
                return candidate
    view = view_of(url, manifests.load(url))
    return None if view is None else counterpart(view.url, split, length)


def _hashes(url: str) -> set[str]:
    """Return the hashes of a dataset's generations: two datasets that share one are the same."""
    from ...dataplane.datasets import manifest as manifests

    return {generation.hash for generation in manifests.load(url).generations}


def unnamed(
    config: EvaluateConfig, trained: RunPlan, urls: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the sources of the mixture that `urls` does not name: for each, the name under which
    its held-out rows are evaluated, or None if there are none. If people have named the datasets,
    no source is missing."""
    from ...dataplane.order.plan import Plan

    if config.sources or not isinstance(trained, Plan):
        return {}
    length = length_of(config, trained)
    sources = [source for source in trained.sources if source.name not in urls]
    owners = {hash: name for name, url in urls.items() for hash in _hashes(url)} if sources else {}
    names: dict[str, str | None] = {}
    for source in sources:
        url = counterpart(source.url, config.split, length)
        hashes = set() if url is None else _hashes(url)
        names[source.name] = next((owners[hash] for hash in hashes if hash in owners), None)
    return names


def missing_note(names: Sequence[str], split: str) -> str:
    return (
        f"no held-out rows of {', '.join(names)}: there is no `{split}` beside "
        f"{'its dataset' if len(names) == 1 else 'their datasets'} "
        f"(`tokenize build --split {split}=0.01`)"
    )


def plan_of(config: EvaluateConfig, trained: RunPlan) -> Plan:
    """Return the plan of the rows to evaluate on: a phase of one step for each source."""
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
    length = length_of(config, trained)
    sources = held_out(config, trained)
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
