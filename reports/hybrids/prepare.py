"""Prepare a comparison: models of equal parameters, and one plan of rows for all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ...console import config as yaml_config
from ...console.errors import ConfigError, ConfigProblem, MisuseError, PlanError
from ...dataplane.order.plan import Plan
from ...mixtures.mixture_file.mixture import Mixture
from ...mixtures.mixture_file.tolerant_read import read
from ...mixtures.planning.resolve_mixture import resolve_draft
from ...models.accounting.count import build_meta, count_parameters
from ...models.config.config import SUFFIXES, ModelConfig, load_model_config
from ...trainer.loop.evaluate import plan_held_out
from ...trainer.run import config as run_config
from ...trainer.run.config import RunConfig
from ...trainer.run.request import RunRequest

SHIPPED = ("transformer-1m", "mamba2-hybrid-1m", "gdn-hybrid-1m", "hyena-hybrid-1m", "kda-mla-1m")
TOLERANCE = 0.02
"""Equal parameters: all counts are within this part of the first model's."""
SHIPPED_RUN = "hybrids"


@dataclass(frozen=True)
class PreparedComparison:
    run: RunConfig
    mixture: Mixture
    plan: Plan
    held_out: Plan
    models: Mapping[str, ModelConfig]
    parameters: Mapping[str, int]
    request: Mapping[str, Any]
    """Everything that decides the curves, apart from tokens and seeds, which may grow."""

    def step_at(self, tokens: int) -> int:
        """Return the number of steps that read at least `tokens` tokens."""
        steps = range(self.plan.first_step, self.plan.end_step)
        return bisect_left(steps, tokens, key=lambda step: self.plan.step(step).end_token) + 1


def prepare(
    run: str | None, mixture: str, models: Sequence[str], overrides: Sequence[str]
) -> PreparedComparison:
    """Resolve and check the runs' configuration, their rows and their models."""
    request = RunRequest(overrides=overrides)
    if request.select_overrides("model"):
        problem = ConfigProblem("model", "each run has a model of its own", typed=True)
        raise ConfigError("the overrides on the command line", [problem])
    configuration = run_config.load(run or shipped_run(), request.run_overrides)
    if configuration.evaluate is None:
        raise MisuseError("the runs evaluate nothing", hint="set evaluate: {every: 50, rows: 16}")
    draft = read(mixture, request.select_overrides("mixture"))
    plan = resolve_draft(draft).plan
    configs = _load_models(models)
    parameters = {name: count_parameters(build_meta(config)) for name, config in configs.items()}
    check_equal(parameters)
    plain = yaml_config.plain(configuration)
    return PreparedComparison(
        configuration,
        draft.mixture,
        plan,
        plan_held_out(configuration.evaluate, plan),
        configs,
        parameters,
        {
            "plan": plan.hash,
            "configuration": {key: plain[key] for key in run_config.DECIDES},
            "held_out": {**plain["evaluate"], "every": 1},
            "models": {name: run_config.model_identity(config) for name, config in configs.items()},
        },
    )


def shipped_run() -> Path:
    return Path(str(resources.files("headrace.configs"))) / "runs" / f"{SHIPPED_RUN}.yaml"


def check_equal(parameters: Mapping[str, int]) -> None:
    """Raise unless the models have equally many parameters, within TOLERANCE."""
    first, *_ = parameters.values()
    if all(abs(count - first) <= TOLERANCE * first for count in parameters.values()):
        return
    counts = ", ".join(f"{name} {count:,}" for name, count in parameters.items())
    raise PlanError(
        f"the models differ by more than {TOLERANCE:.0%} in parameters: {counts}",
        hint="change the width of an MLP: operators.glu.hidden",
    )


def _load_models(names: Sequence[str]) -> dict[str, ModelConfig]:
    models: dict[str, ModelConfig] = {}
    for name in names:
        path = Path(name)
        title = path.stem if path.suffix in SUFFIXES else name
        if title in models:
            raise MisuseError(f"two models are called {title}", hint="name each model once")
        models[title] = load_model_config(name)
    return models
