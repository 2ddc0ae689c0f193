"""An engine where one rank holds the whole state: no gather, no reduction, one cast a step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ....models.accounting.state import StatePart
from ..config import EngineConfig
from ..traffic import Traffic
from .settings import FsdpConfig

if TYPE_CHECKING:
    from ....models.accounting.level import EngineMemory
    from ....models.accounting.state import BytesPerParameter, Degrees, Shards
    from ....models.config.options.precision import Precision
    from ...layout.config import LayoutConfig
    from ...layout.groups import Parallel
    from ..config import StateOnDevice
    from ..objective import Objective
    from ..optimizers.config import OptimizerConfig
    from .one_rank_engine import OneRank


@dataclass(frozen=True, kw_only=True)
class OneRankConfig(FsdpConfig):
    """What `for_ranks` returns for one rank: of FSDP2 unless it holds single blocks, of DeepSpeed
    unless it offloads or has keys of DeepSpeed's own (`extra`). No run names it."""

    @classmethod
    def replacing(cls, engine: EngineConfig) -> OneRankConfig:
        """Return the settings that have the place of another engine's on one rank."""
        keys = {field.name: getattr(engine, field.name) for field in fields(EngineConfig)}
        return cls(**{**keys, "kind": "fsdp2", "gather": "step"})

    def describe(self) -> str:
        return f"one rank, nothing sharded{', compiled' if self.compile else ''}"

    def describe_with_layout(self, layout: LayoutConfig) -> str:
        return self.describe()

    def traffic(self, layout: LayoutConfig, device: str) -> Traffic:
        return Traffic()

    def state_layout(
        self,
        precision: Precision,
        optimizer_bytes: BytesPerParameter,
        device: str,
        layout: LayoutConfig,
    ) -> list[StatePart]:
        """Return the parts of a rank's state. In fp32 the weights are the masters."""
        parts = [
            StatePart(name="weights", bytes_per_parameter=precision.weight_bytes),
            StatePart(name="gradients", bytes_per_parameter=4),
            StatePart(name="optimizer", bytes_per_parameter=optimizer_bytes),
        ]
        if precision.separate_masters:
            parts.append(StatePart(name="masters", bytes_per_parameter=4))
        return parts

    def memory(self, state: StateOnDevice, shards: Shards, degrees: Degrees) -> EngineMemory:
        from .one_rank_memory import OneRankMemory

        return OneRankMemory(state, shards, degrees)

    def build(
        self,
        objective: Objective,
        optimizer: OptimizerConfig,
        precision: Precision,
        parallel: Parallel,
    ) -> OneRank:
        from .one_rank_engine import OneRank

        return OneRank(self, objective, optimizer, precision, parallel)
