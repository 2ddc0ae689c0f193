"""DeepSpeed: ZeRO 0 to 3 over the data axis.

DeepSpeed owns the flat buffers and the reduction of gradients, and calls the optimizer. headrace
owns the optimizer's arithmetic, the norm and clipping (update.py), and the accumulation boundary.
zero/state.py locates the state, and zero/experts.py makes DeepSpeed split experts: no other file
reads DeepSpeed's private fields. A rank that holds the whole state alone has another engine
(fsdp/one_rank.py), unless `offload_optimizer` or `extra` asks for DeepSpeed's.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from ...console.errors import LayoutError, MissingError
from .config import EngineConfig
from .fsdp.one_rank import OneRankConfig
from .traffic import Traffic, UnshardedWeights
from .zero.settings import ZeroConfig

if TYPE_CHECKING:
    import torch

    from ...models.accounting.level import EngineMemory
    from ...models.accounting.state import BytesPerParameter, Degrees, Shards, StatePart
    from ...models.config.options.precision import Precision
    from ..checkpoints.fragments import Fragment
    from ..layout.config import LayoutConfig
    from ..layout.groups import Parallel
    from .config import StateOnDevice
    from .engine import Engine
    from .objective import Objective, Sums
    from .optimizers.config import OptimizerConfig

LARGEST_BUCKET = {"cuda": 200_000_000, "cpu": 1 << 22}
"""Default maximum number of elements that are reduced or gathered at once: DeepSpeed allocates a
buffer with this size in every step. The allocator keeps the CPU's size between steps."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig(ZeroConfig):
    """DeepSpeed's ZeRO."""

    packages = ("deepspeed",)

    def check(self, layout: LayoutConfig, processes: int, precision: Precision) -> None:
        if self.zero == 3 and not layout.holds_all_layers:
            raise LayoutError(
                "DeepSpeed's ZeRO-3 (engine.zero=3) needs the same modules on every rank; the "
                f"stages of a pipeline (layout.pp={layout.pp}) have different ones",
                hint="use engine.kind=fsdp2, which shards weights too, or engine.zero=2",
            )
        if layout.ep > 1 and self.zero not in (1, 2):
            also = ", which shards weights too" if self.zero == 3 else ""
            raise LayoutError(
                f"DeepSpeed's ZeRO-{self.zero} does not split experts (layout.ep={layout.ep})",
                hint=f"use engine.kind=fsdp2{also}, engine.zero=1 or 2, or layout.ep=1",
            )
        if self.zero == 0 and precision.separate_masters:
            raise LayoutError(
                "DeepSpeed without ZeRO (engine.zero=0) sums bf16 gradients in bf16",
                hint="use engine.zero=1, which sums them in fp32, or precision=fp32",
            )
        if self.overlap_comm and not self.can_overlap(precision):
            raise LayoutError(
                f"engine.overlap_comm=true: DeepSpeed's ZeRO-{self.zero} in {precision} reduces "
                "gradients after the last backward pass",
                hint="use engine.zero=2, or leave overlap_comm out",
            )
        self._check_partitions(layout, processes)

    def _check_partitions(self, layout: LayoutConfig, processes: int) -> None:
        size = self.zero_hpz_partition_size
        if size > 1 and layout.tp > 1:
            raise LayoutError(
                f"engine.zero_hpz_partition_size={size} joins neighbouring ranks, which tensor "
                f"parallelism (layout.tp={layout.tp}) gives different shards of the model",
                hint="use layout.tp=1, or zero_hpz_partition_size=1",
            )
        if processes % size:
            raise LayoutError(
                f"engine.zero_hpz_partition_size={size} does not divide the {processes} ranks",
                hint="use the number of GPUs of a machine",
            )

    def for_ranks(self, ranks: int) -> EngineConfig:
        if ranks > 1 or self.offloads or self.extra:
            return self
        return OneRankConfig.replacing(self)

    @classmethod
    def candidates(cls, shard: int | None, *, alone: bool) -> list[Self]:
        stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
        return [] if shard is not None or alone else [cls(zero=zero) for zero in stages]

    @classmethod
    def fewest_messages(cls) -> Self:
        return cls(zero=1)

    def choices(self, layout: LayoutConfig) -> dict[str, object]:
        offload = {"offload": self.offload_optimizer} if self.offloads else {}
        return {"zero": self.zero, **offload}

    def traffic(self, layout: LayoutConfig, device: str) -> Traffic:
        from .zero.messages import traffic

        return traffic(self, LARGEST_BUCKET[device])

    def unsharded_weights(self, layout: LayoutConfig) -> UnshardedWeights:
        return UnshardedWeights(blocks=False, outside=False)

    def check_compile(self, shared_block: str) -> None:
        if self.zero == 3:
            raise LayoutError(
                f"engine.compile: ZeRO-3 (engine.zero=3) gathers the shared block `{shared_block}` "
                "within the blocks that call it, which torch.compile cannot trace",
                hint="use engine.kind=fsdp2, which shards weights too, or engine.zero=2",
            )

    def describe(self) -> str:
        details = {
            "reductions in bf16": self.communication_data_type == "bf16",
            "optimizer on the CPU": self.offloads,
            f"hpz {self.zero_hpz_partition_size}": self.zero_hpz_partition_size > 1,
            "compiled": self.compile,
        }
        enabled = (detail for detail, is_on in details.items() if is_on)
        return ", ".join([f"DeepSpeed ZeRO-{self.zero}", *enabled])

    def state_layout(
        self,
        precision: Precision,
        optimizer_bytes: BytesPerParameter,
        device: str,
        layout: LayoutConfig,
    ) -> list[StatePart]:
        """Return the parts of a rank's state."""
        from .zero.memory import state_layout

        return state_layout(self, precision, optimizer_bytes, device, LARGEST_BUCKET[device])

    def memory(self, state: StateOnDevice, shards: Shards, degrees: Degrees) -> EngineMemory:
        from .zero.step_memory import ZeroMemory

        return ZeroMemory(self, state, shards, degrees, LARGEST_BUCKET[state.device])

    def load(self, device: str) -> None:
        super().load(device)
        _import(device)

    def build(
        self,
        objective: Objective,
        optimizer: OptimizerConfig,
        precision: Precision,
        parallel: Parallel,
    ) -> Engine:
        config = self.for_ranks(parallel.data.size)
        if config is not self:
            return config.build(objective, optimizer, precision, parallel)
        return DeepSpeed(self, objective, optimizer, precision, parallel)


class DeepSpeed:
    def __init__(
        self,
        config: DeepSpeedConfig,
        objective: Objective,
        optimizer: OptimizerConfig,
        precision: Precision,
        parallel: Parallel,
    ) -> None:
        deepspeed = _import(parallel.device.type)
        from ...models.config.precision import compute_dtype
        from ...models.model.block import Block
        from .groups import engine_groups, local_shards, parameter_groups
        from .objective import parameters
        from .optimizers.moving_average import MovingAverage
        from .outside.frozen import Frozen
        from .outside.full_precision import FullPrecision
        from .pieces import FragmentBuilder
        from .zero import experts, state
        from .zero.memory import bucket_elements

        # DeepSpeed requires it, and a process without a launcher has none.
        os.environ.setdefault("LOCAL_RANK", str(parallel.device.index or 0))
        model = objective.model
        fp32 = model.full_precision(precision)
        shards, all_groups = local_shards(model), parameter_groups(model, optimizer, fp32)
        groups = engine_groups(all_groups)
        self.frozen = Frozen(model, fp32, all_groups, shards, precision, parallel)
        self.fp32 = FullPrecision(model, all_groups, optimizer, shards, parallel)
        split = parallel.axes.experts.size > 1
        numel = sum(parameter.numel() for parameter in objective.parameters())
        reduced, gathered = (
            bucket_elements(numel, largest or LARGEST_BUCKET[parallel.device.type])
            for largest in (config.reduce_bucket_size, config.allgather_bucket_size)
        )
        settings = config.settings(
            precision, parallel.device.type, reduced, gathered, split_experts=split
        )
        mpu = ProcessGroups(parallel)
        if precision.separate_masters:
            objective.to(compute_dtype(precision))  # on the meta device: creates bf16 memory
        if config.zero == 3:
            _partition(objective, settings, mpu, parallel.device)
        else:
            objective.to_empty(device=parallel.device)
        self.objective = objective
        self.device = parallel.device
        self.dtype = compute_dtype(precision)
        self.ranks = parallel.data.size
        self.replicated = config.zero == 0
        self.clip = optimizer.clip
        self.updates = 0
        config.compile_blocks(model, parallel.device)
        if config.zero == 3 and config.compile:  # gather a block whole: it is one graph
            deepspeed.utils.set_z3_leaf_modules(model, [Block])
        named = parameters(objective)
        self.optimizer = optimizer.build(model, groups, named)
        _allow(type(self.optimizer))
        with experts.split_experts(objective, self.optimizer, groups, named, shards, parallel):
            self.engine, *_ = deepspeed.initialize(
                model=objective,
                optimizer=self.optimizer,
                config=settings,
                dist_init_required=False,
                mpu=mpu,
            )
        if split:
            experts.check(self.engine, groups, parallel)
        self.state = state.find(self.engine, self.optimizer, named, parallel.data)
        self.fp32.register_buffers()
        self.frozen.register_buffers()
        averaged = optimizer.ema is not None
        self.fragment_builder = FragmentBuilder(self.optimizer, shards, groups, averaged=averaged)
        self.average = MovingAverage(optimizer.ema, self.device)

    def __call__(self, *inputs: Any) -> Sums:
        sums: Sums = self.engine(*inputs)
        return sums

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the ranks; the loop wants sums.
        self.engine.backward(loss * self.ranks, scale_wrt_gas=False)
        if last:
            self.fp32.reduce(1 / self.ranks)

    def gradients(self) -> list[Fragment]:
        pieces = self.state.pieces()
        gradients = self.fragment_builder.gradients(pieces, self.state.gradients(pieces))
        return gradients + self.fp32.gradients()

    def step(self, lr: float, finite: torch.Tensor) -> None:
        """DeepSpeed's step reads from the device, so this method may read too."""
        if not finite:
            self.discard()
            return
        self.optimizer.set_lr(lr)
        self.engine.step()
        assert self.engine.was_step_applied(), "the gradients are finite"
        self.fp32.step(lr, finite)

    def discard(self) -> None:
        self.fp32.discard()
        if self.replicated:
            self.engine.zero_grad()
            return
        self.state.refuse()
        logger = logging.getLogger("DeepSpeed")
        level = logger.level
        logger.setLevel(logging.ERROR)  # it would warn of an overflow: headrace says why
        try:
            self.engine.step()
        finally:
            logger.setLevel(level)
        assert not self.engine.was_step_applied(), "the gradients are not finite"
        # ZeRO-3 returns before it gathers what the next forward pass needs.
        self.state.refresh()

    def fragments(self) -> list[Fragment]:
        outside = self.fp32.fragments() + self.frozen.fragments()
        return self.fragment_builder.fragments(self.state.pieces()) + outside

    def loaded(self, steps: int) -> None:
        self.updates = steps
        self.optimizer.loaded(steps)
        self.fp32.loaded(steps)
        self.frozen.loaded()
        self.average.loaded(steps)
        self.state.refresh()
        self.engine.global_steps = steps
        self.engine.micro_steps = steps


class ProcessGroups:
    """Process groups with the methods that DeepSpeed calls (`mpu`).

    The model-parallel group is this rank alone: DeepSpeed reduces a norm over it once per parameter
    group, and would hang where ranks have different numbers of groups. It is a gloo group: NCCL
    would split it from the world's communicator, which is a collective over all ranks.
    """

    def __init__(self, parallel: Parallel) -> None:
        import torch.distributed as dist

        self.data = parallel.data
        self.alone = dist.new_group([parallel.rank], backend="gloo", use_local_synchronization=True)

    def get_data_parallel_group(self) -> Any:
        return self.data.group

    def get_data_parallel_rank(self) -> int:
        return self.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self.data.size

    def get_model_parallel_group(self) -> Any:
        return self.alone

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1


def _partition(
    objective: Objective, settings: dict[str, Any], mpu: ProcessGroups, device: torch.device
) -> None:
    """Create and partition parameters module by module: no rank holds the full model."""
    import deepspeed
    import torch
    from torch import nn

    partition = None
    for module in objective.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty_like(parameter, device=device)
            setattr(module, attribute, nn.Parameter(empty))
        parameters = list(module.parameters(recurse=False))
        if partition is not None:
            partition(param_list=parameters)
        elif parameters:
            groups = {"data_parallel_group": mpu.data.group, "mpu": mpu}
            deepspeed.zero.Init(
                module=nn.ParameterList(parameters), config_dict_or_path=settings, **groups
            )
            partition = parameters[0].convert_to_zero_parameters  # type: ignore[attr-defined]


def _allow(optimizer: type) -> None:
    """Let DeepSpeed accept a class of optimizers without a warning."""
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    if optimizer not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(optimizer)


def _import(device: str) -> Any:
    # Otherwise DeepSpeed queries CUDA, after which no fork can, and warns if there is no GPU.
    os.environ.setdefault("DS_ACCELERATOR", device)
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise MissingError(
            f"the engine `deepspeed` needs the package deepspeed ({error})",
            hint="pip install deepspeed, or set engine.kind=fsdp2, which needs torch alone",
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device == "cpu":
        # DeepSpeed would compile a shared-memory all-reduce, which needs a C++ compiler, and probe
        # for a dozen operators that headrace does not use.
        deepspeed.ops.__compatible_ops__ = {}
    _import_muon()
    return deepspeed


def _import_muon() -> None:
    """Import DeepSpeed's Muon, which DeepSpeed needs in the first step and headrace does not use.
    Muon compiles functions, for which torch would import its compiler: two seconds."""
    from deepspeed.runtime import compiler

    compile_function = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_function
