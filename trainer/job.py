"""What a run is, resolved and checked before anything starts.

    YAML, mixture, model, overrides ─► Job: configuration, model, plan, layout, and what it costs

A run's folder holds the resolved job. The same command finds it there and goes on with it, and
is refused if it says something else.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import config as reader
from ..console.errors import (
    ConfigError,
    LayoutError,
    PlanError,
    Problem,
    RunError,
    StorageError,
)
from ..console.progress import as_bytes
from . import config as run_config
from . import division, evaluate
from . import origin as origins
from .checkpoints import store
from .config import RunConfig
from .folder import RunFolder, differences
from .launch import joined, speaks, threads_for
from .origin import Checkpoint, Origin
from .request import Request
from .schedule import Plan, micro_batches, micro_rows

if TYPE_CHECKING:
    from ..models.config import ModelConfig

STATE_BYTES = 12
"""Of a checkpoint, for each parameter: master, exp_avg, exp_avg_sq in fp32."""
DISK_RESERVE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Job:
    folder: RunFolder
    run: RunConfig
    """With device, processes and precision replaced by what they come to here."""
    model: ModelConfig
    plan: Plan
    mixture: dict[str, Any] | None = None
    """The mixture's data, as written; None for random rows."""

    @property
    def processes(self) -> int:
        assert self.run.processes is not None
        return self.run.processes

    @property
    def threads(self) -> int:
        """Of each process; it follows the processes of this start, unless it was asked for."""
        if self.run.threads is not None:
            return self.run.threads
        return threads_for(int(os.environ.get("LOCAL_WORLD_SIZE", self.processes)))

    @property
    def dp(self) -> int:
        return self.run.layout.data_parallel(self.processes)

    @property
    def parent(self) -> str | None:
        """The checkpoint that the mixture branches from."""
        after = (self.mixture or {}).get("after")
        if not after:
            return None
        return str(RunFolder(after["run"]).checkpoints / store.name(self.plan.first_step))

    def origin(self) -> Origin | None:
        """What gives the initial weights: the parent's checkpoint, or what init_from names."""
        source = self.run.init_from
        if self.parent is not None:
            return origins.find(self.parent)
        return origins.find(source.path, source.step) if source is not None else None

    @property
    def held_out(self) -> Path:
        """The plan of the rows that are evaluated on."""
        assert self.run.evaluate is not None
        return self.folder.root / evaluate.file_of(self.run.evaluate)

    @property
    def identity(self) -> str:
        """Names the run by what makes it this one and no other."""
        parts = [run_config.deciding(self.run), reader.plain(self.model), self.plan.hash]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def save(self) -> None:
        """Write the resolved job into the run's folder; run.yaml, which makes it a run, last."""
        from ..dataplane import storage
        from ..dataplane.plan import Plan as MixturePlan

        if isinstance(self.plan, MixturePlan):
            self.plan.save(self.folder.plan)
            storage.write(str(self.folder.mixture), reader.dump(self.mixture).encode())
        storage.write(str(self.folder.model), reader.dump(self.model).encode())
        storage.write(str(self.folder.run), reader.dump(self.run).encode())


def resolve(request: Request) -> Job:
    """A new job, or the one in the folder if it is the same."""
    asked = run_config.load(request.run, request.own)
    _check_joined(asked)
    run = resolve_slurm(asked) if request.slurm else resolve_here(asked)
    if request.mixture is None and run.synthetic is None:
        raise RunError(
            "a run needs rows",
            mend="give a mixture with --mixture FILE.yaml, or random rows with synthetic.steps=20",
        )
    if request.mixture is not None and run.synthetic is not None:
        raise RunError("a run has a mixture or synthetic rows, not both")
    if request.mixture is None and request.part("mixture"):
        raise ConfigError(
            "the command line",
            [
                Problem(f"mixture.{word.partition('=')[0]}", "there is no mixture to change")
                for word in request.part("mixture")
            ],
        )
    name = Path(request.run or request.mixture or "synthetic").stem
    folder = RunFolder(request.out or f"runs/{name}")
    model = _model(request, run, folder)
    mixture = None
    if request.mixture is not None:
        data, _ = reader.read_yaml(request.mixture)
        mixture = reader.apply_overrides(data, request.part("mixture"))
    if folder.begun:
        stored = load(folder)
        run = _with_origin(run, stored.run)
        _check_same(stored, run, model, mixture)
        return replace(stored, run=run)
    run = _with_origin(run, None)
    if speaks():  # the first rank may have written there already
        folder.check_free()
    if request.mixture is not None:
        from ..mixtures.resolve import resolve_file

        plan: Plan = resolve_file(request.mixture, request.part("mixture"))
    else:
        plan = _synthetic(run, model)
    return Job(folder=folder, run=run, model=model, plan=plan, mixture=mixture)


def _model(request: Request, run: RunConfig, folder: RunFolder) -> ModelConfig:
    """The one that was asked for, or that the initial weights are of."""
    from ..models.config import load_model_config

    changes = request.part("model")
    if request.model is None and run.init_from is not None and not changes:
        if folder.begun:  # what it began from may be gone by now
            return load_model_config(folder.model)
        return origins.find(run.init_from.path, run.init_from.step).model
    return load_model_config(request.model or "tiny-hybrid", changes)


def load(folder: RunFolder, overrides: Sequence[str] = (), *, slurm: bool = False) -> Job:
    """The job of a run's folder. Overrides may change what does not make it another run."""
    from ..models.config import load_model_config

    folder.check_is_run()
    data, lines = reader.read_yaml(folder.run)
    stored = run_config.build(data, (), source=str(folder.run), lines=lines)
    changeable = run_config.overridable(data, overrides)
    asked = run_config.build(changeable, overrides, source=str(folder.run), lines=lines)
    if any(word.startswith("processes=") for word in overrides):
        _check_joined(asked)
    run = resolve_slurm(asked) if slurm else resolve_here(asked)
    model = load_model_config(folder.model)
    mixture = None
    if stored.synthetic is None:
        from ..dataplane.plan import Plan as MixturePlan

        plan: Plan = MixturePlan.load(folder.plan)
        mixture, _ = reader.read_yaml(folder.mixture)
    else:
        plan = _synthetic(stored, model)
    job = Job(folder=folder, run=stored, model=model, plan=plan, mixture=mixture)
    _check_same(job, run, model, mixture)
    return replace(job, run=run)


def resolve_here(run: RunConfig) -> RunConfig:
    """Replace what is left open by what it comes to on this machine."""
    from .layout import choose_device, count_gpus

    device = choose_device(run.device)
    processes = run.processes or (count_gpus() if device == "cuda" else 1)
    if joined():
        processes = int(os.environ["WORLD_SIZE"])
    precision = run.precision
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    return replace(
        run,
        device=device,
        processes=processes,
        precision=precision,
    )


def resolve_slurm(run: RunConfig) -> RunConfig:
    """The same for a batch job: what it will come to there."""
    if run.processes not in (None, run.slurm.world):
        raise LayoutError(
            f"processes={run.processes}, and a batch job of {run.slurm.nodes} × "
            f"{run.slurm.per_node} has {run.slurm.world}",
            mend="leave processes out; slurm.nodes, slurm.gpus and slurm.processes decide",
        )
    device = run.device
    if device == "auto":
        device = "cuda" if run.slurm.gpus else "cpu"
    precision = run.precision
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    return replace(run, device=device, processes=run.slurm.world, precision=precision)


def _check_joined(asked: RunConfig) -> None:
    """Another launcher has decided how many processes there are."""
    if joined() and asked.processes not in (None, int(os.environ["WORLD_SIZE"])):
        raise LayoutError(
            f"processes={asked.processes}, and the launcher that set WORLD_SIZE has started "
            f"{os.environ['WORLD_SIZE']}",
            mend="leave processes out under torchrun",
        )


def check(job: Job, *, elsewhere: bool = False) -> None:
    """Everything that can be known to fail before the first step."""
    dp = job.dp
    assert job.run.precision != "auto"
    job.run.engine.check(job.run.layout, job.processes, job.run.precision)
    lengths = [phase.seq_len for phase in job.plan.phases]
    if job.run.evaluate is not None and job.run.evaluate.seq_len is not None:
        lengths.append(job.run.evaluate.seq_len)
    division.check(job.run.layout, job.processes, job.model, lengths)
    if job.plan.vocab_size > job.model.vocab_size:
        raise PlanError(
            f"the mixture's tokenizer has {job.plan.vocab_size:,} ids, the model embeds "
            f"{job.model.vocab_size:,}",
            mend=f"override model.vocab_size={job.plan.vocab_size}, or take another model",
        )
    for phase in job.plan.phases:
        table = job.model.learned_positions
        if table is not None and phase.seq_len > table:
            raise PlanError(
                f"phase {phase.name} has rows of {phase.seq_len:,} tokens, and the model's table "
                f"of positions (learned_positions) has {table:,}",
                mend=f"use rows of {table} tokens at most, or model.learned_positions="
                f"{phase.seq_len}",
            )
        if phase.batch_rows < dp:
            raise LayoutError(
                f"phase {phase.name} updates on {phase.batch_rows} rows, fewer than the {dp} "
                "data-parallel processes",
                mend=f"use processes={phase.batch_rows} at most, or a larger batch",
            )
    if job.parent is not None and job.run.init_from is not None:
        raise RunError(
            "the mixture continues a run (`after`), whose weights it takes, and init_from names "
            "others",
            mend="leave out one of them",
        )
    origin = None if job.folder.begun else job.origin()
    if origin is not None:
        source = job.run.init_from
        origins.check(origin, job.model, moments=source is not None and source.moments)
    if job.run.evaluate is not None and not job.held_out.exists():
        evaluate.plan_of(job.run.evaluate, job.plan)
    if job.run.device == "cuda" and not elsewhere:
        from .layout import count_gpus

        if job.processes > count_gpus() and not joined():
            raise LayoutError(
                f"{job.processes} processes for {count_gpus()} GPUs",
                mend=f"use processes={count_gpus()}",
            )


def check_disk(job: Job) -> None:
    """A checkpoint must fit beside the ones that are kept while it is written."""
    need = checkpoint_bytes(job) + DISK_RESERVE
    root = job.folder.root.absolute()
    there = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        raise StorageError(
            f"{job.folder.root} has {as_bytes(free)} free, and one checkpoint takes "
            f"{as_bytes(need)}",
            mend="free some space, or choose another --out",
        )


def parameters(job: Job) -> int:
    from ..models.count import build_meta
    from ..models.count import parameters as count

    return count(build_meta(job.model))


def parameters_by_rank(job: Job) -> list[int]:
    """Of the part of the model that each process along the tensor axis has."""
    from ..models.count import build_meta
    from ..models.count import parameters as count
    from ..models.parallel.axes import Axes, Axis

    found = []
    for rank in range(job.run.layout.tp):
        model = build_meta(job.model)
        model.divide(Axes(tensor=Axis(None, rank, job.run.layout.tp)))
        found.append(count(model))
    return found


def checkpoint_bytes(job: Job) -> int:
    return STATE_BYTES * parameters(job)


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
            mend="start a new run with another --out (a mixture can go on from this one with "
            "`after: {run: …, step: …}`), or undo the change",
        )


def _synthetic(run: RunConfig, model: ModelConfig) -> Plan:
    from .synthetic import SyntheticPlan

    assert run.synthetic is not None
    return SyntheticPlan(run.synthetic, model.vocab_size, run.seed)


def arithmetic(job: Job) -> list[dict[str, Any]]:
    """Each phase's rows, micro-batches and steps."""
    found = []
    for phase in job.plan.phases:
        rows = micro_rows(job.run.micro_batch_tokens, phase, job.dp, job.run.layout.cp)
        found.append(
            {
                "phase": phase.name,
                "tokens": phase.tokens,
                "steps": phase.steps,
                "seq_len": phase.seq_len,
                "rows": phase.batch_rows,
                "micro_batches": micro_batches(rows, phase, job.dp),
                "micro_batch_rows": rows,
            }
        )
    return found
