"""Read a run's folder as it stands, on any machine.

`trainer report`, `mixtures audit`, `trainer export` and `trainer sample` do not need the run's
devices. `resolve.load` adapts a stored run to this machine for a start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...console import config as reader
from ...console.errors import RunError
from ..folders.folder import RunFolder
from ..loop.batches import RunPlan
from . import config as run_config
from .config import RunConfig
from .job import Job
from .layout_plan import load_plan

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig


def read_run(folder: RunFolder) -> Job:
    """Read the stored job, with the device, ranks and precision from its last start."""
    from ...models.config.config import load_model_config

    folder.check_is_run()
    data, lines = reader.read_yaml(folder.run)
    run = run_config.build(data, (), source=str(folder.run), lines=lines)
    if run.processes is None or "auto" in (run.device, run.precision):
        raise RunError(
            f"{folder.run} is not resolved: processes, device and precision must have values",
            hint="restore it from a copy: a start writes it with these values",
        )
    model = load_model_config(folder.model)
    layout = load_plan(folder.layout) if folder.layout.exists() else None
    if run.synthetic is not None:
        rows = synthetic_plan(run, model)
        return Job(folder=folder, run=run, model=model, plan=rows, layout_plan=layout)
    from ...dataplane.order.plan import Plan

    mixture, _ = reader.read_yaml(folder.mixture)
    plan = Plan.load(folder.plan)
    return Job(folder=folder, run=run, model=model, plan=plan, mixture=mixture, layout_plan=layout)


def synthetic_plan(run: RunConfig, model: ModelConfig) -> RunPlan:
    from ..loop.synthetic import SyntheticPlan

    assert run.synthetic is not None
    return SyntheticPlan(run.synthetic, model.vocab_size, run.seed)
