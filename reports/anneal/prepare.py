"""Prepare an anneal: the candidates, their configuration and model, and the held-out rows.

Every candidate is scored on the same rows: the held-out datasets of all candidates, at one length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...console import config as reader
from ...console.errors import ConfigError, PlanError, Problem, RunError
from ...mixtures.mixture_file.mixture import After
from ...trainer.folders.folder import RunFolder
from ...trainer.loop.config import EvaluateConfig
from ...trainer.loop.evaluate import distinct, held_out, length_of, plan_of, unnamed
from ...trainer.run import config as run_config
from ...trainer.run.config import RunConfig
from ...trainer.run.request import Request
from ...trainer.run.stored import read_run
from .candidates import Candidate, candidates

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request to compare mixtures from a checkpoint."""

    run: str
    step: int | None
    mixtures: Sequence[str]
    grid: Mapping[str, Sequence[float]]
    seeds: int
    overrides: Sequence[str]
    """Overrides of the run's keys, and of the mixtures' behind `mixture.`."""


@dataclass(frozen=True)
class Prepared:
    candidates: Sequence[Candidate]
    run: RunConfig
    """The configuration of all runs, but for their ranks and device, which a start resolves."""
    processes: int | None
    """Ranks of the run that is continued, on its machine."""
    model: ModelConfig
    request: Mapping[str, Any]
    """Everything that decides the scores."""
    not_scored: Sequence[str]
    """Sources of the candidates without held-out rows."""


def prepare(question: Question) -> Prepared:
    """Return the candidates and the configuration of their runs, checked."""
    parent = read_run(RunFolder(question.run))
    if parent.mixture is None:
        raise RunError(
            f"{question.run} trains on synthetic rows, which no mixture continues",
            hint="name a run that was started with --mixture",
        )
    request = Request(overrides=question.overrides)
    if request.overrides_of("model"):
        problem = Problem("model", "the candidates have the model of the run", typed=True)
        raise ConfigError("the overrides on the command line", [problem])
    after = After(run=question.run, step=question.step)
    found = candidates(
        question.mixtures, after, question.grid, question.seeds, request.overrides_of("mixture")
    )
    run, not_scored = _configuration(question, parent.run, found)
    assert run.evaluate is not None
    return Prepared(
        found,
        replace(run, processes=None, device="auto"),
        run.processes,
        parent.model,
        {
            "run": question.run,
            "step": found[0].plan.first_step,
            "candidates": {f"{each.name}, seed {each.seed}": each.plan.hash for each in found},
            "configuration": run_config.deciding(run, parent.model),
            "held_out": reader.plain(replace(run.evaluate, every=1)),
        },
        not_scored,
    )


def _configuration(
    question: Question, parent: RunConfig, found: Sequence[Candidate]
) -> tuple[RunConfig, list[str]]:
    """Return the configuration of all runs, and the sources without held-out rows.

    It is that of the run that they continue, with evaluation on the same held-out rows. Weights
    come from its checkpoint; they save in folders of their own.
    """
    own = replace(parent, init_from=None, checkpoints=replace(parent.checkpoints, url=None))
    request = Request(overrides=question.overrides)
    run = run_config.build(
        run_config.overridable(reader.plain(own), request.run_overrides),
        request.run_overrides,
        source=f"the run {question.run}",
    )
    steps = max(each.plan.last_step - each.plan.first_step for each in found)
    evaluate = run.evaluate or EvaluateConfig(every=steps)
    length = min(length_of(evaluate, each.plan) for each in found)
    evaluate = replace(evaluate, seq_len=length)
    sources: dict[str, str] = {}
    for each in found:
        for name, url in held_out(evaluate, each.plan).items():
            if sources.setdefault(name, url) != url:
                raise PlanError(
                    f"the candidates hold out two datasets as {name}: {sources[name]} and {url}",
                    hint=f"name the one that scores: evaluate.sources.{name}=URL",
                )
    sources = sources if evaluate.sources else distinct(sources)
    owners = [owner for each in found for owner in unnamed(evaluate, each.plan, sources).items()]
    not_scored = list(dict.fromkeys(name for name, owner in owners if owner is None))
    evaluate = replace(evaluate, sources=sources)
    plan_of(evaluate, found[0].plan)  # raises if a dataset is too short, or of another tokenizer
    return replace(run, evaluate=evaluate), not_scored
