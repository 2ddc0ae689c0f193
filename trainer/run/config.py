"""Configure a run: everything but the mixture and the model.

optimizer: {lr: 1e-3}
engine: {kind: deepspeed, zero: 1}
checkpoints: {every: 200}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...console import config as reader
from ...console.config import Data, Lines, NameIn, OneOf
from ...models.config.options.names import Divisor
from ...models.config.options.precision import PRECISIONS, Fp8Config
from ...models.config.options.recompute import Recompute
from ...models.config.options.rope import Rope
from ...models.layers.attention.order import KernelsConfig
from ..checkpoints.policy import CheckpointConfig
from ..cluster.slurm import SlurmConfig
from ..engines import ENGINES
from ..engines.config import EngineConfig
from ..engines.deepspeed import DeepSpeedConfig
from ..engines.optimizers import DEFAULT, OPTIMIZERS
from ..engines.optimizers.config import OptimizerConfig
from ..layout.config import LayoutConfig
from ..layout.devices import DeviceKind
from ..loop.config import DataConfig, EvaluateConfig
from ..loop.synthetic import SyntheticConfig
from ..record.config import WatchConfig
from ..scores.config import ScoresConfig
from ..weights.source import InitFrom

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    seed: int = 1
    """Seed of the initial weights and of random numbers within a step."""
    precision: Annotated[str, NameIn(PRECISIONS, "auto")] = "auto"
    """bf16 keeps masters, moments and gradient sums in fp32; fp8 computes large products in e4m3
    beside it. auto: bf16 on GPU, fp32 on CPU."""
    fp8: Fp8Config | None = None
    """Matrices whose products run in FP8, under precision=fp8."""
    optimizer: Annotated[OptimizerConfig, OneOf(OPTIMIZERS, tag="kind")] = field(
        default_factory=DEFAULT
    )
    z_loss: float = 0.0
    """Weight of log²Z in the objective, which keeps logits from drifting; Z is the sum of the
    exponentials of a target's logits. Recorded losses are the cross entropy alone; the metrics have
    the mean of the addition as `z_loss`."""
    loss_divisor: Divisor = "weights"
    """Divisor of Σ w·ℓ over the global batch. weights: Σ w; targets: the number of targets whose
    weight is not 0, so that down-weighted targets (masked DNA) lower the loss and its gradient.
    Savanna calls them normalized_weighted and weighted. Recorded and evaluated losses have the same
    divisor."""
    init_from: InitFrom | None = None
    """Initial weights from a model of the same shape."""

    processes: int | None = None
    """Ranks on this machine. Default: one for each GPU, or one."""
    device: DeviceKind = "auto"
    """auto: GPUs if torch finds any, else the CPU."""
    threads: int | None = None
    """Threads of each rank on CPU. Default: the machine's cores divided by its ranks."""
    deterministic: bool = False
    """Use deterministic kernels on GPU, so that a resume is equal to the bit there too."""
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    micro_batch_tokens: int = 8192
    """Maximum tokens of a rank's micro-batch; a micro-batch has at least one row. Under context
    parallelism only the rank's own parts of rows count."""
    recompute: Recompute = "none"
    """Activations that the backward pass recomputes instead of keeping them in memory: `none`, of
    each `operator` call, of each `block`, of a fraction of the blocks (0.4), of each n-th block
    (`{every: 3}`), of blocks without the results of operations (`{save: [matmul, attention, scan,
    convolution]}`), or a list with a rule for each layer. No rule changes a bit of the result."""
    engine: Annotated[EngineConfig, OneOf(ENGINES, tag="kind")] = field(
        default_factory=DeepSpeedConfig
    )
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the run saves, and which checkpoints it keeps."""
    evaluate: EvaluateConfig | None = None
    """The loss on held-out rows, at intervals."""
    scores: ScoresConfig | None = None
    """Scores of checkpoints on tasks, at intervals."""
    watch: WatchConfig = field(default_factory=WatchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """The batch job that `--slurm` submits."""
    synthetic: SyntheticConfig | None = None
    """Synthetic rows, for a run without a mixture."""

    def __post_init__(self) -> None:
        for key in ("processes", "threads", "micro_batch_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")
        if isinstance(self.recompute, float) and not 0 < self.recompute <= 1:
            raise ValueError(f"recompute must be above 0 and at most 1, not {self.recompute}")
        if self.fp8 is not None and self.precision != "fp8":
            raise ValueError(f"fp8 needs precision=fp8, not {self.precision}: remove one of them")
        if self.scores is not None and self.scores.every % self.checkpoints.every:
            raise ValueError(
                f"scores.every={self.scores.every} must be a multiple of "
                f"checkpoints.every={self.checkpoints.every}"
            )
        if self.scores is not None and self.scores.ema and self.optimizer.ema is None:
            raise ValueError("scores.ema needs optimizer.ema")
        if self.z_loss < 0:
            raise ValueError(f"z_loss must be at least 0, not {self.z_loss}")


DECIDES = (
    "seed",
    "precision",
    "fp8",
    "optimizer",
    "z_loss",
    "loss_divisor",
    "init_from",
    "synthetic",
)
"""Keys that define a run: a change starts a new run. All remaining keys may change on resume."""

COUPLED = "{} balances over a micro-batch: micro_batch_tokens, layout.cp and dp define the run"
"""Explanation for the keys in `division`, with a placeholder for the operators' names."""


def load(
    file: str | Path | None, overrides: Sequence[str] = (), planned: Data | None = None
) -> RunConfig:
    """Load a run's YAML, if given. Keys from a layout plan replace those in the file, and overrides
    are applied last."""
    data, lines = reader.read_yaml(file) if file else ({}, {(): None})  # None: typed by a person
    data = {**data, **(planned or {})}
    return build(data, overrides, source=str(file) if file else "the run", lines=lines)


def build(
    data: Data, overrides: Sequence[str], *, source: str, lines: Lines | None = None
) -> RunConfig:
    data = reader.apply_overrides(data, overrides, lines)
    for key, default in (("engine", DeepSpeedConfig), ("optimizer", DEFAULT)):
        settings = data.get(key)
        if isinstance(settings, dict):
            settings.setdefault("kind", default().kind)
    return reader.build(RunConfig, data, source=source, lines=lines)


def drop_replaced_engine(stored: Data, overrides: Sequence[str]) -> Data:
    """Drop the stored engine's options if overrides choose a different engine, which does not have
    them."""
    kinds = [word.partition("=")[2] for word in overrides if word.startswith("engine.kind=")]
    if kinds and kinds[-1] != stored["engine"]["kind"]:
        return {**stored, "engine": {}}
    return stored


def defining_settings(config: RunConfig, model: ModelConfig) -> dict[str, Any]:
    """Return the settings that define the run. Their hash is a part of its identity."""
    plain: dict[str, Any] = reader.plain(config)
    settings = {key: plain[key] for key in DECIDES}
    return settings | division(config) if model.couples_rows else settings


def model_identity(model: ModelConfig) -> dict[str, Any]:
    """Return the model's settings as they are hashed."""
    settings: dict[str, Any] = reader.plain(model)
    for options in settings["operators"].values():
        rope = options.get("rope")
        if rope and rope["scaling"] not in ("yarn", "llama3"):  # only exports read it
            rope["original_length"] = Rope.original_length
    return settings


def division(config: RunConfig) -> dict[str, Any]:
    """Return the settings that divide a step's rows into micro-batches. They define a run whose
    model balances experts over a micro-batch."""
    assert config.processes is not None
    dp, cp = config.layout.data_parallel(config.processes), config.layout.cp
    return {"micro_batch_tokens": config.micro_batch_tokens, "layout.cp": cp, "dp": dp}
