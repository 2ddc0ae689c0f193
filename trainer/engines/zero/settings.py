"""Define a run's keys for DeepSpeed, and translate them into DeepSpeed's configuration.

`engine.extra` reaches DeepSpeed unchanged. DeepSpeed ignores unknown names, and many known names
would change results or the location of its state, so `extra` takes only the names in `EXTRA`. Their
code was read in DeepSpeed 0.19.8: they change speed, memory or messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from ....console.errors import ConfigProblem, ConfigProblems
from ....models.config.options.names import LinearForm
from ....models.config.options.precision import Precision
from ..config import EngineConfig

ZERO = "zero_optimization"
PERSISTENCE = "stage3_param_persistence_threshold"
PERSISTENT = 100_000
"""DeepSpeed's default threshold."""
EFFICIENT_LINEAR = "memory_efficient_linear"
"""Replaces linear layers by DeepSpeed's function in ZeRO-3."""
EXTRA: dict[str, tuple[str, ...]] = {
    "": (
        "comms_logger",
        "dump_state",
        "memory_breakdown",
        "steps_per_print",
        "wall_clock_breakdown",
    ),
    ZERO: (
        "enable_sanity_checks",
        "log_trace_cache_warnings",
        EFFICIENT_LINEAR,
        "stage3_allgather_sequential",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_module_granularity_threshold",
        PERSISTENCE,
        "stage3_use_all_reduce_for_fetch_params",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
    ),
}
"""Names that `engine.extra` takes, at the top level and in `zero_optimization`."""

OWN_KEYS = {
    "optimizer": "optimizer",
    "gradient_clipping": "optimizer.clip",
    "scheduler": "the lr of the mixture's phases",
    "bf16": "precision",
    "fp16": "precision",
    "amp": "precision",
    "data_types": "precision",
    "torch_autocast": "precision",
    "train_batch_size": "the batch of the mixture's phases",
    "train_micro_batch_size_per_gpu": "micro_batch_tokens",
    "gradient_accumulation_steps": "micro_batch_tokens",
    "curriculum_learning": "the mixture's phases",
    "data_efficiency": "the mixture's phases",
    "activation_checkpointing": "recompute",
    "communication_data_type": "engine.communication_data_type",
    "zero_force_ds_cpu_optimizer": "engine.offload_optimizer",
    f"{ZERO}.stage": "engine.zero",
    f"{ZERO}.stage3_prefetch_bucket_size": "engine.allgather_bucket_size",
    **{
        f"{ZERO}.{name}": f"engine.{name}"
        for name in (
            "allgather_bucket_size",
            "offload_optimizer",
            "overlap_comm",
            "reduce_bucket_size",
            "zero_hpz_partition_size",
        )
    },
}
"""The run's key for each name in DeepSpeed's configuration that has one."""


def extra_problems(extra: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield a problem for each name in `engine.extra` that is refused, with the run's key for the
    same setting if there is one."""
    for name, value in extra.items():
        if name != ZERO:
            yield from _name_problems("", name)
        elif not isinstance(value, Mapping):
            yield ConfigProblem(f"extra.{name}", "should be a section")
        else:
            for inner_name in value:
                yield from _name_problems(ZERO, inner_name)


def _name_problems(section: str, name: str) -> Iterator[ConfigProblem]:
    if name in EXTRA[section]:
        return
    path = f"{section}.{name}".removeprefix(".")
    if path in OWN_KEYS:
        yield ConfigProblem(f"extra.{path}", f"has a key of its own: {OWN_KEYS[path]}")
        return
    where = f"in {section}" if section else f"beside {ZERO}"
    yield ConfigProblem(
        f"extra.{path}",
        "would change results or the places of the state, or DeepSpeed does not know it; "
        f"{where}, extra takes {', '.join(EXTRA[section])}",
    )


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(EngineConfig):
    """Keys with the names that DeepSpeed has for them."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero: Literal[0, 1, 2, 3] = 1
    """State that is sharded over the data-parallel ranks. 0: none; 1: masters and optimizer
    states; 2: gradients too; 3: weights too. 0 needs fp32: without ZeRO, DeepSpeed sums bf16
    gradients in bf16."""
    overlap_comm: bool | None = None
    """Reduce gradients while the backward pass runs. Default: on a GPU where DeepSpeed can: in
    ZeRO-2 and 3, and in ZeRO-1 in fp32 or with offload_optimizer (in bf16, ZeRO-1 reduces after the
    last backward pass). On CPU its reductions wait for gloo, and ZeRO-1 and 2 hold a second
    bucket."""
    reduce_bucket_size: int | None = None
    """Most elements that are reduced at once. Default: 200 million on a GPU, 4 million on the CPU,
    and at most the parameters of a rank."""
    allgather_bucket_size: int | None = None
    """Most elements that are gathered at once. The same default."""
    communication_data_type: Literal["fp32", "bf16"] = "fp32"
    """Number format in which gradients are reduced. bf16 sends half as much, and rounds each rank's
    gradients."""
    offload_optimizer: Literal["cpu"] | None = None
    """`cpu`: masters and optimizer states lie in host memory, and the CPU updates them with
    headrace's AdamW. Muon is refused."""
    zero_hpz_partition_size: int = 1
    """ZeRO++: neighbouring ranks (those of a machine) that share a second copy of the weights, from
    which the backward pass gathers. ZeRO-3 only, without tensor parallelism."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More of DeepSpeed's own configuration, under DeepSpeed's names, such as `{zero_optimization:
    {stage3_max_live_parameters: 500M}}`. It takes names that change speed, memory or messages
    alone; others are refused, with the key of the run that has their place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if problems := [*extra_problems(self.extra), *self._problems()]:
            raise ConfigProblems(problems)

    def _problems(self) -> Iterator[ConfigProblem]:
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            size = getattr(self, name)
            if size is not None and (size < 2 or size % 2):
                yield ConfigProblem(name, f"must be even and at least 2, not {size}")
        ranks = self.zero_hpz_partition_size
        if ranks < 1:
            yield ConfigProblem("zero_hpz_partition_size", f"must be at least 1, not {ranks}")
        if ranks > 1 and self.zero != 3:
            message = f"needs zero=3: zero={self.zero} keeps the weights whole"
            yield ConfigProblem("zero_hpz_partition_size", message)
        if self.offloads and not self.zero:
            yield ConfigProblem("offload_optimizer", "needs zero=1, 2 or 3")

    @property
    def offloads(self) -> bool:
        return self.offload_optimizer is not None

    def offloading(self) -> Self | None:
        return replace(self, offload_optimizer="cpu") if self.zero else None

    def overlaps(self, precision: Precision, device: str) -> bool:
        """Return whether DeepSpeed reduces gradients during the backward pass. On the CPU it would
        wait for gloo at each bucket, and hold two buckets."""
        if self.overlap_comm is not None:
            return self.overlap_comm
        return device == "cuda" and self.can_overlap(precision)

    def can_overlap(self, precision: Precision) -> bool:
        """Return whether DeepSpeed can overlap. Without ZeRO, and in ZeRO-1 in half precision with
        the optimizer on the device, it always reduces after the last backward pass."""
        reduces_late = self.zero == 1 and precision.separate_masters and not self.offloads
        return self.zero > 0 and not reduces_late

    @property
    def linear(self) -> LinearForm:
        is_replaced = self.zero == 3 and self.extra.get(ZERO, {}).get(EFFICIENT_LINEAR, True)
        return "zero3" if is_replaced else "torch"

    @property
    def persistent(self) -> int:
        """Elements up to which ZeRO-3 keeps an unsharded copy of a parameter."""
        return int(self.extra.get(ZERO, {}).get(PERSISTENCE, PERSISTENT))

    def settings(
        self, precision: Precision, device: str, reduced: int, gathered: int, *, split_experts: bool
    ) -> dict[str, Any]:
        """Return DeepSpeed's configuration. `reduced` and `gathered` are the elements reduced and
        gathered at once."""
        half = precision.separate_masters
        zero: dict[str, Any] = {
            "stage": self.zero,
            "overlap_comm": self.overlaps(precision, device),
            # Before ZeRO-3, DeepSpeed's "reduce_scatter" is an all-reduce of a copy, and a copy
            # back. Experts' gradients are summed in no other way.
            "reduce_scatter": self.zero == 3 or split_experts,
            "reduce_bucket_size": reduced,
            "allgather_bucket_size": gathered,
            "stage3_prefetch_bucket_size": gathered,
            "zero_hpz_partition_size": self.zero_hpz_partition_size,
        }
        top_level: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # counters only: the loop owns the batch
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # update.py clips
            "communication_data_type": self.communication_data_type,
            "bf16": {"enabled": half, "check_grad_overflow": half},
        }
        if self.zero:  # without ZeRO, sums have the weights' format, and weights are fp32
            top_level["data_types"] = {"grad_accum_dtype": "fp32"}
        if self.offloads:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device == "cuda"}
            top_level["zero_force_ds_cpu_optimizer"] = False  # headrace's AdamW instead
        extra = dict(self.extra)
        return {**top_level, ZERO: {**zero, **extra.pop(ZERO, {})}, **extra}
