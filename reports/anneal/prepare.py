"""Prepare an anneal: resolve the candidates, their configuration and model, and the held-out rows.

All candidates are scored on the same rows: all their held-out datasets, at their shortest sequence
length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...console import config as yaml_config
from ...console.errors import ConfigError, ConfigProblem, PlanError, RunError
from ...mixtures.mixture_file.mixture import After
from ...trainer.folders.folder import RunFolder
from ...trainer.loop.config import EvaluateConfig
from ...trainer.loop.evaluate import (
    distinct_datasets,
    held_out_datasets,
    plan_held_out,
    row_length,
    unnamed_sources,
)
from ...trainer.run import config as run_config
from ...trainer.run.config import RunConfig
from ...trainer.run.request import RunRequest
from ...trainer.run.stored import read_run
from .candidates import MixtureCandidate, resolve_candidates

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class AnnealRequest:
    """A request to compare mixtures from a checkpoint."""

    run: str
    step: int | None
    mixtures: Sequence[str]
    grid: Mapping[str, Sequence[float]]
    num_seeds: int
    overrides: Sequence[str]
    """Overrides for the runs' keys and, with the prefix `mixture.`, for the mixtures' keys."""


@dataclass(frozen=True)
class PreparedAnneal:
    candidates: Sequence[MixtureCandidate]
    run: RunConfig
    """Configuration for all runs. A start resolves their ranks and device."""
    processes: int | None
    """Ranks on this machine in the run to continue."""
    model: ModelConfig
    request: Mapping[str, Any]
    """Everything that decides the scores, as anneal.json has it."""
    not_scored: Sequence[str]
    """Sources that have no held-out rows."""


def prepare(request: AnnealRequest) -> PreparedAnneal:
    """Resolve and check the candidates and their runs' configuration."""
    parent = read_run(RunFolder(request.run))
    if parent.mixture is None:
        raise RunError(
            f"{request.run} trains on synthetic rows, which no mixture continues",
            hint="name a run that was started with --mixture",
        )
    overrides = RunRequest(overrides=request.overrides)
    if overrides.select_overrides("model"):
        problem = ConfigProblem("model", "the candidates have the model of the run", typed=True)
        raise ConfigError("the overrides on the command line", [problem])
    after = After(run=request.run, step=request.step)
    candidates = resolve_candidates(
        request.mixtures,
        after,
        request.grid,
        request.num_seeds,
        overrides.select_overrides("mixture"),
    )
    run, not_scored = _configure_runs(request, parent.run, candidates)
    assert run.evaluate is not None
    return PreparedAnneal(
        candidates,
        replace(run, processes=None, device="auto"),
        run.processes,
        parent.model,
        {
            "run": request.run,
            "step": candidates[0].plan.first_step,
            "candidates": {
                f"{candidate.name}, seed {candidate.seed}": candidate.plan.learnt_hash
                for candidate in candidates
            },
            "configuration": run_config.defining_settings(run, parent.model),
            "held_out": yaml_config.plain(replace(run.evaluate, every=1)),
        },
        not_scored,
    )


def _configure_runs(
    request: AnnealRequest, parent: RunConfig, candidates: Sequence[MixtureCandidate]
) -> tuple[RunConfig, list[str]]:
    """Return the configuration for all runs, and the sources without held-out rows.

    The runs keep the parent's configuration and evaluate on the same held-out rows. Weights come
    from the parent's checkpoint, and each run saves in its folder.
    """
    base = replace(parent, init_from=None, checkpoints=replace(parent.checkpoints, url=None))
    overrides = RunRequest(overrides=request.overrides).run_overrides
    run = run_config.build(
        run_config.drop_replaced_engine(yaml_config.plain(base), overrides),
        overrides,
        source=f"the run {request.run}",
    )
    plans = [candidate.plan for candidate in candidates]
    num_steps = max(plan.end_step - plan.first_step for plan in plans)
    evaluate = run.evaluate or EvaluateConfig(every=num_steps)
    evaluate = replace(evaluate, seq_len=min(row_length(evaluate, plan) for plan in plans))
    sources: dict[str, str] = {}
    for plan in plans:
        for name, url in held_out_datasets(evaluate, plan).items():
            if sources.setdefault(name, url) != url:
                raise PlanError(
                    f"the candidates hold out two datasets as {name}: {sources[name]} and {url}",
                    hint=f"name the one that scores: evaluate.sources.{name}=URL",
                )
    sources = sources if evaluate.sources else distinct_datasets(sources)
    scorers = [item for plan in plans for item in unnamed_sources(evaluate, plan, sources).items()]
    not_scored = list(dict.fromkeys(name for name, scorer in scorers if scorer is None))
    evaluate = replace(evaluate, sources=sources)
    plan_held_out(
        evaluate, plans[0]
    )  # raises if a dataset is too short or has a different tokenizer
    return replace(run, evaluate=evaluate), not_scored
