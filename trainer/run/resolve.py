"""From what a person asks for, or a run's folder, to a job.

    YAML, mixture, model, overrides ─┐
                                     ├─► Job: configuration, model, plan
    the folder of a run that began ──┘

A run's folder holds the resolved job. The same command finds it there and goes on with it, and
is refused if it says something else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...console import config as reader
from ...console.errors import ConfigError, LayoutError, Problem, RunError, run_all
from ..cluster.ranks import is_first, joined
from ..folder import RunFolder, differences
from ..loop.batches import Plan
from ..weights import source as origins
from ..weights.source import Checkpoint
from . import config as run_config
from .config import RunConfig
from .request import Request
from .run import Job

if TYPE_CHECKING:
    from ...models.config import ModelConfig

DEFAULT_MODEL = "tiny-hybrid"

ANOTHER_KIND = {"--mixture": {"sources", "phases"}, "--model": {"pattern", "operators"}}
"""What YAMLs have that are given in place of a run's, by the option that takes them."""


def resolve(request: Request) -> Job:
    """A new job, or the one in the folder if it is the same."""
    name = Path(request.run or request.mixture or "synthetic").stem
    folder = RunFolder(request.out or f"runs/{name}")
    run, model, planned = run_all(
        lambda: _run(request), lambda: _named_model(request), lambda: _planned(request, folder)
    )
    model = model or _unnamed_model(run, folder)
    mixture = None
    if request.mixture is not None:
        data, _ = reader.read_yaml(request.mixture)
        mixture = reader.apply_overrides(data, request.overrides_of("mixture"))
    if folder.begun:
        stored = load(folder)
        run = _with_origin(run, stored.run)
        _check_same(stored, run, model, mixture)
        return replace(stored, run=run)
    run = _with_origin(run, None)
    if is_first():  # the first rank may have written there already
        folder.check_free()
    plan = planned or _synthetic(run, model)
    return Job(folder=folder, run=run, model=model, plan=plan, mixture=mixture)


def load(folder: RunFolder, overrides: Sequence[str] = (), *, slurm: bool = False) -> Job:
    """The job of a run's folder. Overrides may change what does not make it another run."""
    from ...models.config import load_model_config

    folder.check_is_run()
    data, lines = reader.read_yaml(folder.run)
    stored = run_config.build(data, (), source=str(folder.run), lines=lines)
    changeable = run_config.overridable(data, overrides)
    asked = run_config.build(changeable, overrides, source=str(folder.run), lines=lines)
    # How many processes the start before had binds no launcher and no batch job.
    if (slurm or joined()) and not any(word.startswith("processes=") for word in overrides):
        asked = replace(asked, processes=None)
    run = _here_or_there(asked, slurm=slurm)
    model = load_model_config(folder.model)
    mixture = None
    if stored.synthetic is None:
        from ...dataplane.order.plan import Plan as MixturePlan

        plan: Plan = MixturePlan.load(folder.plan)
        mixture, _ = reader.read_yaml(folder.mixture)
    else:
        plan = _synthetic(stored, model)
    job = Job(folder=folder, run=stored, model=model, plan=plan, mixture=mixture)
    _check_same(job, run, model, mixture)
    return replace(job, run=run)


def _run(request: Request) -> RunConfig:
    """Its configuration; a run has rows of one kind."""
    try:
        asked = run_config.load(request.run, request.run_overrides)
    except ConfigError as error:
        unknown = {problem.path for problem in error.problems}
        for option, keys in ANOTHER_KIND.items():
            if request.run is not None and keys <= unknown:
                hint = f"this is no run's YAML, but what {option} takes: {option} {request.run}"
                raise ConfigError(error.source, error.problems, hint=hint) from None
        raise
    run = _here_or_there(asked, slurm=request.slurm)
    if request.mixture is None and run.synthetic is None:
        raise RunError(
            "a run needs rows",
            hint="give a mixture with --mixture FILE.yaml, or random rows with synthetic.steps=20",
        )
    if request.mixture is not None and run.synthetic is not None:
        raise RunError("a run has a mixture or synthetic rows, not both")
    changes = [word.partition("=")[0] for word in request.overrides_of("mixture")]
    if request.mixture is None and changes:
        problems = [Problem(f"mixture.{path}", "there is no mixture to change") for path in changes]
        raise ConfigError("the command line", problems)
    return run


def _named_model(request: Request) -> ModelConfig | None:
    """The model that was asked for, if one was."""
    from ...models.config import load_model_config

    changes = request.overrides_of("model")
    if request.model is None and not changes:
        return None
    return load_model_config(request.model or DEFAULT_MODEL, changes)


def _unnamed_model(run: RunConfig, folder: RunFolder) -> ModelConfig:
    """That of the initial weights, if some are named."""
    from ...models.config import load_model_config

    if run.init_from is None:
        return load_model_config(DEFAULT_MODEL)
    if folder.begun:  # what it began from may be gone by now
        return load_model_config(folder.model)
    return origins.find(run.init_from.path, run.init_from.step).model


def _planned(request: Request, folder: RunFolder) -> Plan | None:
    """The mixture's plan; a run that has begun has its own."""
    from ...mixtures.planning.resolve_mixture import resolve_file

    if request.mixture is None or folder.begun:
        return None
    return resolve_file(request.mixture, request.overrides_of("mixture"))


def _synthetic(run: RunConfig, model: ModelConfig) -> Plan:
    from ..loop.synthetic import SyntheticPlan

    assert run.synthetic is not None
    return SyntheticPlan(run.synthetic, model.vocab_size, run.seed)


def _with_origin(run: RunConfig, stored: RunConfig | None) -> RunConfig:
    """Pin "the newest checkpoint" of init_from to what it was when the run began."""
    source = run.init_from
    if source is None or source.step is not None:
        return run
    if stored is not None and stored.init_from is not None:
        return replace(run, init_from=replace(source, step=stored.init_from.step))
    found = origins.find(source.path)
    if not isinstance(found, Checkpoint) or found.where == source.path.rstrip("/"):
        return run
    return replace(run, init_from=replace(source, step=found.step))


def _check_same(
    stored: Job, run: RunConfig, model: ModelConfig, mixture: dict[str, Any] | None
) -> None:
    """Refuse to go on with a run as another one."""
    pairs = (
        (run_config.deciding(stored.run), run_config.deciding(run), ""),
        (stored.model, model, "model"),
        (stored.mixture, mixture, "mixture"),
    )
    changed = [line for there, here, name in pairs for line in differences(there, here, name)]
    if changed:
        what = "its mixture" if all(c.startswith("mixture") for c in changed) else "it"
        raise RunError(
            f"{stored.folder.root} holds another run: {what} differs",
            where="\n" + "\n".join(f"    {line}" for line in changed),
            hint="start a new run with another --out (a mixture can go on from this one with "
            "`after: {run: …, step: …}`), or undo the change",
        )


def _here_or_there(asked: RunConfig, *, slurm: bool) -> RunConfig:
    """Replace what is left open by what it comes to on this machine, or in the batch job."""
    run = _in_batch_job(asked) if slurm else _on_this_machine(asked)
    if run.precision == "auto":
        run = replace(run, precision="bf16" if run.device == "cuda" else "fp32")
    return run


def _on_this_machine(run: RunConfig) -> RunConfig:
    from ..layout.devices import choose_device, count_gpus

    device = choose_device(run.device)
    processes = run.processes or (count_gpus() if device == "cuda" else 1)
    if joined():
        processes = int(os.environ["WORLD_SIZE"])
        if run.processes not in (None, processes):
            raise LayoutError(
                f"processes={run.processes}, and the launcher that set WORLD_SIZE has started "
                f"{processes}",
                hint="leave processes out under torchrun",
            )
    return replace(run, device=device, processes=processes)


def _in_batch_job(run: RunConfig) -> RunConfig:
    if run.processes not in (None, run.slurm.world):
        raise LayoutError(
            f"processes={run.processes}, and a batch job of {run.slurm.nodes} × "
            f"{run.slurm.per_node} has {run.slurm.world}",
            hint="leave processes out; slurm.nodes, slurm.gpus and slurm.processes decide",
        )
    device = run.device
    if device == "auto":
        device = "cuda" if run.slurm.gpus else "cpu"
    return replace(run, device=device, processes=run.slurm.world)
