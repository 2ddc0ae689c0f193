"""A run as people write it: everything that is neither the mixture nor the model.

optimizer: {lr: 1e-3}
engine: {kind: deepspeed, zero: 1}
checkpoints: {every: 200}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from ...console import config as reader
from ...console.config import Data, Lines, NameIn, OneOf
from ...models.precision import PRECISIONS
from ..checkpoints.policy import CheckpointConfig
from ..cluster.slurm import SlurmConfig
from ..engines import ENGINES, EngineConfig
from ..engines.deepspeed import DeepSpeedConfig
from ..engines.optimizers import DEFAULT, OPTIMIZERS
from ..engines.optimizers.base import OptimizerConfig
from ..layout.layout import DeviceKind, LayoutConfig
from ..loop.evaluate import EvaluateConfig
from ..loop.guard import Action, Guard


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How the rows are read. None of it changes which rows."""

    workers: int = 0
    """Processes of each rank that read ahead; 0 reads in the step itself."""
    cache: str | None = None
    """Folder that keeps what is read from object storage; all processes and runs of a machine may
    share one. Left out: headrace in the user's cache folder."""
    cache_bytes: int = 64 << 30
    """How large the cache may grow. It should hold two windows of every source."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers must be at least 0, not {self.workers}")
        if self.cache_bytes < 1:
            raise ValueError(f"cache_bytes must be at least 1, not {self.cache_bytes}")


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What is shown of a run, and what ends it."""

    log_seconds: float = 5.0
    """Seconds between two lines on the terminal, at least."""
    tensorboard: bool = True
    """Write TensorBoard's files as well."""
    wandb: str | None = None
    """A project of Weights & Biases that gets the same charts (extra `wandb`)."""
    not_finite: Action = "stop"
    """A step whose gradients are not finite changes nothing. stop: the run ends; skip: it goes on;
    rollback: it goes on with the weights of the newest checkpoint."""
    spike: Action | Literal["none"] = "none"
    """The same for a step whose loss is a spike; none: it is applied like any other."""
    spike_bound: float = 10.0
    """A loss is a spike above the median of those before it by so many of their deviations."""
    spike_window: int = 100
    """How many losses before it count; the first quarter of a window is not looked at."""
    rollbacks: int = 3
    """How often a run may go back to one checkpoint before it ends."""
    stall_seconds: float = 1800.0
    """End the run when no process has begun another step, or part of the start, for so long; 0:
    never."""
    peak_flops: float | None = None
    """Of one device, for MFU; known GPUs need none."""

    def __post_init__(self) -> None:
        for name, least in (
            ("log_seconds", 0),
            ("stall_seconds", 0),
            ("spike_bound", 0),
            ("spike_window", 4),
            ("rollbacks", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def guard(self) -> Guard:
        return Guard(
            not_finite=self.not_finite,
            spike=self.spike,
            bound=self.spike_bound,
            window=self.spike_window,
            rollbacks=self.rollbacks,
        )


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Random rows instead of a mixture's: to measure a machine, with torch alone."""

    steps: int = 20
    """Updates of the run."""
    seq_len: int = 1024
    """Tokens of a row."""
    batch_rows: int = 8
    """Rows of an update."""
    warmup: int = 2
    """Steps over which the learning rate rises."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("seq_len", 1), ("batch_rows", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class InitFrom:
    """Begin with other weights than random ones. The stream begins at its start."""

    path: str
    """Another run's folder, a checkpoint (its folder or s3:// URL), or a folder of transformers or
    of Vortex."""
    step: int | None = None
    """Which checkpoint of a run; the newest, if left out."""
    moments: bool = False
    """Take Adam's moments as well."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    seed: int = 1
    """Of the initial weights, and of whatever is random in a step."""
    precision: Annotated[str, NameIn(PRECISIONS, "auto")] = "auto"
    """bf16: with fp32 masters, moments and sums of gradients. auto: bf16 on GPU, fp32 on CPU."""
    optimizer: Annotated[OptimizerConfig, OneOf(OPTIMIZERS, tag="kind")] = field(
        default_factory=DEFAULT
    )
    z_loss: float = 0.0
    """Weight of log²Z in the loss, which keeps logits from drifting."""
    init_from: InitFrom | None = None
    """Weights of a model of the same shape, to begin with."""

    processes: int | None = None
    """Processes on this machine. Left out: one for each GPU, or one."""
    device: DeviceKind = "auto"
    """Left at auto: GPUs where there are any, else the CPU."""
    threads: int | None = None
    """Threads of each process on CPU. Left out: the machine's cores, shared out."""
    deterministic: bool = False
    """Use deterministic kernels on GPU, so that a resume is equal to the bit there as well."""
    micro_batch_tokens: int = 8192
    """Tokens that a process computes on at once, at most (one row at least)."""
    recompute: Literal["none", "block", "operator"] = "none"
    """What backward computes again instead of keeping it in memory."""
    engine: Annotated[EngineConfig, OneOf(ENGINES, tag="kind")] = field(
        default_factory=DeepSpeedConfig
    )
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the run saves, and what it keeps."""
    evaluate: EvaluateConfig | None = None
    """The loss on what was held out, at intervals."""
    watch: WatchConfig = field(default_factory=WatchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """The batch job, where `--slurm` asks for one."""
    synthetic: SyntheticConfig | None = None
    """Random rows; a run with a mixture has none."""

    def __post_init__(self) -> None:
        for name in ("processes", "threads", "micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.z_loss < 0:
            raise ValueError(f"z_loss must be at least 0, not {self.z_loss}")


DECIDES = ("seed", "precision", "optimizer", "z_loss", "init_from", "synthetic")
"""What makes another run of it. All else may change from one start to the next."""


def load(file: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """A run's configuration: a YAML if there is one, and overrides."""
    data, lines = reader.read_yaml(file) if file else ({}, {})
    return build(data, overrides, source=str(file) if file else "the run", lines=lines)


def build(
    data: Data, overrides: Sequence[str], *, source: str, lines: Lines | None = None
) -> RunConfig:
    data = reader.apply_overrides(data, overrides, lines)
    for name, default in (("engine", DeepSpeedConfig), ("optimizer", DEFAULT)):
        chosen = data.get(name)
        if isinstance(chosen, dict):
            chosen.setdefault("kind", default().kind)
    return reader.build(RunConfig, data, source=source, lines=lines)


def overridable(stored: Data, overrides: Sequence[str]) -> Data:
    """A stored run, as overrides may change it: it says every option of its engine, none of which
    another engine has."""
    kinds = [word.partition("=")[2] for word in overrides if word.startswith("engine.kind=")]
    if kinds and kinds[-1] != stored["engine"]["kind"]:
        return {**stored, "engine": {}}
    return stored


def deciding(config: RunConfig) -> dict[str, Any]:
    plain: dict[str, Any] = reader.plain(config)
    return {name: plain[name] for name in DECIDES}
