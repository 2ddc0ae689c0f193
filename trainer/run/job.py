"""A resolved run: configuration, model, plan and folder."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...console import config as reader
from ...models.config.options.precision import PRECISIONS, Precision
from ...models.config.options.recompute import Rule, expand_rules
from ..checkpoints import store
from ..cluster.ranks import threads_per_rank
from ..folders.folder import RunFolder
from ..layout.cuts import Cuts
from ..loop.batches import RunPlan
from ..loop.config import held_out_digest
from ..weights import source as origins
from ..weights.source import WeightSource
from . import config as run_config
from .config import RunConfig
from .layout_plan import LayoutPlan

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig
    from ..engines.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    folder: RunFolder
    run: RunConfig
    """Configuration with device, processes and precision resolved for this start."""
    model: ModelConfig
    plan: RunPlan
    mixture: dict[str, Any] | None = None
    """The mixture's YAML, parsed; None for synthetic rows."""
    layout_plan: LayoutPlan | None = None
    """The layout plan with which the run was started."""

    @property
    def processes(self) -> int:
        assert self.run.processes is not None
        return self.run.processes

    @property
    def local_ranks(self) -> int:
        """Ranks on this machine in this start."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.processes))

    @property
    def threads(self) -> int:
        """Threads per rank: as configured, or the cores divided by this start's ranks."""
        if self.run.threads is not None:
            return self.run.threads
        return threads_per_rank(self.local_ranks)

    @property
    def precision(self) -> Precision:
        return replace(PRECISIONS[self.run.precision], fp8=self.run.fp8)

    @property
    def dp(self) -> int:
        return self.run.layout.data_parallel(self.processes)

    @cached_property
    def cuts(self) -> Cuts:
        """First layers in the pipeline's chunks, without chunk 0's."""
        from ..layout.stages import choose_cuts

        max_length = max(phase.seq_len for phase in self.plan.phases)
        return choose_cuts(self.run.layout, self.model, max_length)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Recompute rules by layer."""
        return expand_rules(self.run.recompute, len(self.model.layers))

    @property
    def engine(self) -> EngineConfig:
        """The engine of this start."""
        return self.run.engine.for_ranks(self.dp * self.run.layout.cp)

    @property
    def layout(self) -> dict[str, Any]:
        """Engine and degrees of parallelism, for logs and reports."""
        return {
            "engine": self.engine.describe(),
            "processes": self.processes,
            "pp": self.run.layout.pp,
            "dp": self.dp,
            "tp": self.run.layout.tp,
            "cp": self.run.layout.cp,
            "ep": self.run.layout.ep,
            "precision": self.run.precision,
            "device": self.run.device,
            "threads": self.threads,
        }

    @property
    def ends(self) -> list[int]:
        """Steps at which phases end, whose checkpoints are never deleted."""
        return [phase.end_step for phase in self.plan.phases]

    @property
    def parent(self) -> str | None:
        """The checkpoint from which the mixture branches."""
        after = (self.mixture or {}).get("after")
        if not after:
            return None
        return str(RunFolder(after["run"]).checkpoints / store.name(self.plan.first_step))

    def origin(self) -> WeightSource | None:
        """Find the source for initial weights: the parent's checkpoint, or `init_from`."""
        source = self.run.init_from
        if self.parent is not None:
            return origins.find(self.parent)
        return origins.find(source.path, source.step) if source is not None else None

    @property
    def held_out(self) -> Path:
        """File with the plan for held-out rows."""
        assert self.run.evaluate is not None
        return self.folder.held_out(held_out_digest(self.run.evaluate))

    @property
    def identity(self) -> str:
        """Hash over everything that defines the run; equal in all starts."""
        content = [
            run_config.defining_settings(self.run, self.model),
            run_config.model_identity(self.model),
            self.plan.hash,
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    def save(self) -> None:
        """Write the job into the run's folder. run.yaml, which marks a run, is written last."""
        from ...dataplane.order.plan import Plan
        from ...dataplane.storage import storage

        if isinstance(self.plan, Plan):
            self.plan.save(self.folder.plan)
            storage.write(str(self.folder.mixture), reader.dump(self.mixture).encode())
        if self.layout_plan is not None:
            storage.write(str(self.folder.layout), reader.dump(self.layout_plan).encode())
        storage.write(str(self.folder.model), reader.dump(self.model).encode())
        storage.write(str(self.folder.run), reader.dump(self.run).encode())

    def save_note(self, note: str) -> None:
        """Write run.yaml again, with a comment about this start."""
        from ...dataplane.storage import storage

        text = f"{reader.dump(self.run)}# {note}\n"
        storage.write(str(self.folder.run), text.encode())
