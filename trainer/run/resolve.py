"""Resolve a request, or a run's folder, to a job.

    YAML, mixture, model, overrides ─┐
                                     ├─► Job: configuration, model, plan
    folder of a started run  ──┘

A run's folder stores the resolved job. The same command finds it there and resumes it; a command
that defines a different run raises an error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...console import config as reader
from ...console.differences import differences
from ...console.errors import (
    ConfigError,
    ConfigProblem,
    LayoutError,
    MisuseError,
    RunError,
    UserError,
    run_all,
)
from ...models.config.options.precision import PRECISIONS, default_precision
from ..cluster.ranks import is_first, is_rank
from ..folders.folder import RunFolder
from ..loop.batches import RunPlan
from ..weights import source as origins
from ..weights.source import Checkpoint
from . import config as run_config
from . import layout_plan
from .config import RunConfig
from .job import Job
from .plan_check import check_plan
from .request import RunRequest
from .stored import read_run, synthetic_plan

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig

DEFAULT_MODEL = "tiny-hybrid"

ANOTHER_KIND = {"--mixture": {"sources", "phases"}, "--model": {"pattern", "operators"}}
"""Keys, by option, that show that a YAML is not a run's."""


def is_readable(request: RunRequest) -> bool:
    """Return False if `resolve` will raise because of the YAMLs: they are read in a moment, before
    torch is imported."""
    from ...mixtures.mixture_file.tolerant_read import read

    try:
        _load_run(request)
        _load_requested_model(request)
        if request.mixture is None:
            return True
        return not read(request.mixture, request.select_overrides("mixture")).problems
    except UserError:
        return False


def resolve(request: RunRequest) -> Job:
    """Return a new job, or the folder's job if it is the same run."""
    job = _resolve(request)
    if request.layout is None:
        return job
    plan = layout_plan.load_plan(request.layout)
    check_plan(plan, job, request.layout)
    return replace(job, layout_plan=plan)


def _resolve(request: RunRequest) -> Job:
    stem = Path(request.run or request.mixture or "synthetic").stem
    folder = RunFolder(request.out or f"runs/{stem}")
    run, model, plan = run_all(
        lambda: _load_run(request),
        lambda: _load_requested_model(request),
        lambda: _plan_mixture(request, folder),
    )
    run = _resolve_machine(run, slurm=request.slurm, dry_run=request.dry_run)
    model = model or _load_default_model(run, folder)
    mixture = None
    if request.mixture is not None:
        data, _ = reader.read_yaml(request.mixture)
        mixture = reader.apply_overrides(data, request.select_overrides("mixture"))
    if folder.begun:
        stored = read_run(folder)
        run = _pin_origin(run, stored.run)
        _check_same(stored, run, model, mixture)
        return replace(stored, run=run)
    run = _pin_origin(run, None)
    if is_first():  # rank 0 may have written to the folder already
        folder.check_free()
    plan = plan or synthetic_plan(run, model)
    return Job(folder=folder, run=run, model=model, plan=plan, mixture=mixture)


def load(
    folder: RunFolder,
    overrides: Sequence[str] = (),
    *,
    slurm: bool = False,
    dry_run: bool = False,
) -> Job:
    """Return the stored job, adapted to this machine for a start.

    Overrides may change keys that do not define the run.
    """
    stored = read_run(folder)
    data = run_config.drop_replaced_engine(reader.plain(stored.run), overrides)
    run = run_config.build(data, overrides, source=str(folder.run))
    # The last start's ranks do not bind a launcher or a batch job.
    if (slurm or is_rank()) and not any(word.startswith("processes=") for word in overrides):
        run = replace(run, processes=None)
    run = _resolve_machine(run, slurm=slurm, dry_run=dry_run)
    _check_same(stored, run, stored.model, stored.mixture)
    return replace(stored, run=run)


def _load_run(request: RunRequest) -> RunConfig:
    """Load the run's configuration, for any machine, and check that it has a single source of
    rows."""
    try:
        run = run_config.load(request.run, request.run_overrides, _planned_layout(request))
    except ConfigError as error:
        unknown = {problem.path for problem in error.problems}
        for option, keys in ANOTHER_KIND.items():
            if request.run is not None and keys <= unknown:
                hint = f"this YAML is for {option}, not a run: use {option} {request.run}"
                raise ConfigError(error.source, error.problems, hint=hint) from None
        raise
    if request.mixture is None and run.synthetic is None:
        raise MisuseError(
            "the run has no source of rows",
            hint="give a mixture with --mixture FILE.yaml, or synthetic rows with "
            "synthetic.steps=20",
        )
    if request.mixture is not None and run.synthetic is not None:
        raise MisuseError("a run takes rows from a mixture or synthetic rows, not both")
    changes = [word.partition("=")[0] for word in request.select_overrides("mixture")]
    if request.mixture is None and changes:
        problems = [
            ConfigProblem(f"mixture.{path}", "there is no mixture to override", typed=True)
            for path in changes
        ]
        raise ConfigError("the command line", problems)
    return run


def _planned_layout(request: RunRequest) -> dict[str, Any]:
    """Return the keys that the layout plan sets, if there is one."""
    if request.layout is None:
        return {}
    layout_plan.check_overrides(request.run_overrides, request.layout)
    return layout_plan.run_settings(layout_plan.load_plan(request.layout), request.layout)


def _load_requested_model(request: RunRequest) -> ModelConfig | None:
    """Load the model on the command line; None if there is none."""
    from ...models.config.config import load_model_config

    changes = request.select_overrides("model")
    if request.model is None and not changes:
        return None
    return load_model_config(request.model or DEFAULT_MODEL, changes)


def _load_default_model(run: RunConfig, folder: RunFolder) -> ModelConfig:
    """Load the initial weights' model, or the default model."""
    from ...models.config.config import load_model_config

    if run.init_from is None:
        return load_model_config(DEFAULT_MODEL)
    if folder.begun:  # the initial weights may be gone by now
        return load_model_config(folder.model)
    return origins.find(run.init_from.path, run.init_from.step).model


def _plan_mixture(request: RunRequest, folder: RunFolder) -> RunPlan | None:
    """Plan the mixture; None for a run that has started, whose folder has the plan."""
    from ...mixtures.planning.resolve_mixture import resolve_file

    if request.mixture is None or folder.begun:
        return None
    return resolve_file(request.mixture, request.select_overrides("mixture"))


def _pin_origin(run: RunConfig, stored: RunConfig | None) -> RunConfig:
    """Pin "the newest checkpoint" in init_from to its step when the run started."""
    source = run.init_from
    if source is None or source.step is not None:
        return run
    if stored is not None and stored.init_from is not None:
        return replace(run, init_from=replace(source, step=stored.init_from.step))
    origin = origins.find(source.path)
    if not isinstance(origin, Checkpoint) or origin.where == source.path.rstrip("/"):
        return run
    return replace(run, init_from=replace(source, step=origin.step))


def _check_same(
    stored: Job, run: RunConfig, model: ModelConfig, mixture: dict[str, Any] | None
) -> None:
    """Raise unless the folder's run is the one that this configuration defines."""
    settings_before = run_config.defining_settings(stored.run, stored.model)
    settings_after = run_config.defining_settings(run, stored.model)
    changes = [
        *map(str, differences(settings_before, settings_after)),
        *map(str, differences(stored.model, model, "model")),
        *map(str, differences(stored.mixture, mixture, "mixture")),
    ]
    if changes:
        subject = "its mixture" if all(line.startswith("mixture") for line in changes) else "it"
        why = ""
        if any(line.partition(":")[0] in run_config.division(run) for line in changes):
            why = f"{run_config.COUPLED.format(', '.join(stored.model.couples_rows))}; "
        raise RunError(
            f"{stored.folder.root} holds another run: {subject} differs",
            where="\n" + "\n".join(f"    {line}" for line in changes),
            hint=f"{why}start a new run with another --out (a mixture can continue this one with "
            "`after: {run: …, step: …}`), or undo the change",
        )


def _resolve_machine(run: RunConfig, *, slurm: bool, dry_run: bool) -> RunConfig:
    """Resolve device, processes and precision for this machine, or for the batch job."""
    run = _resolve_batch_job(run) if slurm else _resolve_local(run, dry_run)
    if run.precision == "auto":
        run = replace(run, precision=default_precision(run.device).name)
    return replace(run, fp8=run.fp8 or PRECISIONS[run.precision].fp8)


def _resolve_local(run: RunConfig, dry_run: bool) -> RunConfig:
    from ..layout.devices import choose_device, count_gpus

    device = run.device if dry_run and run.device == "cuda" else choose_device(run.device)
    processes = run.processes or (max(1, count_gpus()) if device == "cuda" else 1)
    if is_rank():
        processes = int(os.environ["WORLD_SIZE"])
        if run.processes not in (None, processes):
            raise LayoutError(
                f"processes={run.processes}, but the launcher set WORLD_SIZE={processes}",
                hint="remove processes under torchrun",
            )
    return replace(run, device=device, processes=processes)


def _resolve_batch_job(run: RunConfig) -> RunConfig:
    if run.processes not in (None, run.slurm.world):
        raise MisuseError(
            f"processes={run.processes}, but a batch job of {run.slurm.nodes} × "
            f"{run.slurm.per_node} has {run.slurm.world}",
            hint="remove processes; slurm.nodes, slurm.gpus and slurm.processes decide",
        )
    device = run.device
    if device == "auto":
        device = "cuda" if run.slurm.gpus else "cpu"
    return replace(run, device=device, processes=run.slurm.world)
