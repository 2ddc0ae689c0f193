"""FSDP2: torch's own sharding, block by block. It needs torch alone.

Under tensor parallelism, local shards are sharded over the data axis; under expert parallelism, a
rank's experts over their replicas.

The sharded fp32 parameters are the masters. A block is gathered before it computes, in the compute
precision (FP8 matrices are gathered in FP8: models/layers/fp8_gather.py), and gradients are summed
in fp32. `gather` chooses how long a block stays unsharded. A rank that holds the whole state alone
gathers nothing (fsdp/one_rank.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .config import StateOnDevice
from .fsdp.one_rank import OneRankConfig
from .fsdp.settings import FsdpConfig
from .shard_groups import parse_layer_number, shard_experts, split_by_mesh
from .traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ...models.accounting.level import EngineMemory
    from ...models.accounting.state import BytesPerParameter, Degrees, Shards, StatePart
    from ...models.config.options.precision import Precision
    from ..checkpoints.fragments import Fragment
    from ..layout.config import LayoutConfig
    from ..layout.groups import Parallel
    from .engine import Engine
    from .objective import Objective, Sums
    from .optimizers.config import OptimizerConfig
    from .pieces import ParameterPiece

BLOCK_LAUNCHES, MESSAGE_LAUNCHES = 40, 55
"""FSDP2's host work per block and pass, and per gather or reduction, as numbers of launches.
Measured on a CPU with messages that send nothing."""


@dataclass(frozen=True, kw_only=True)
class Fsdp2Config(FsdpConfig):
    """Torch's fully sharded data parallelism."""

    def for_ranks(self, ranks: int) -> FsdpConfig:
        holds_blocks = self.gather == "block" or self.by_block or self.layers
        if ranks > 1 or self.offloads or holds_blocks:
            return self
        return OneRankConfig.replacing(self)

    def traffic(self, layout: LayoutConfig, device: str) -> Traffic:
        traffic = partial(
            Traffic,
            shard=self.shard,
            pass_launches=BLOCK_LAUNCHES,
            message_launches=MESSAGE_LAUNCHES,
            on_host=("gather", "reduce", "update") if self.offloads else (),
        )
        match self.gather_mode(layout):
            case "block":
                return traffic(
                    forward=("gather",), backward=("reduce", "gather"), may_stay_unsharded=True
                )
            case "micro-batch":
                return traffic(forward=("gather",), backward=("reduce",))
            case "step":
                return traffic(first_forward=("gather",), last_backward=("reduce",))

    def state_layout(
        self,
        precision: Precision,
        optimizer_bytes: BytesPerParameter,
        device: str,
        layout: LayoutConfig,
    ) -> list[StatePart]:
        """Return the parts of a rank's state: fp32 parameters, sharded by rows."""
        from ...models.accounting.state import HOST, StatePart, cut_flat, cut_root, cut_rows
        from .fsdp2_memory import count_unsharded

        sharded = partial(
            StatePart, sharded_over=("dp", "cp"), shard_ranks=self.shard_ranks, cut=cut_rows
        )
        gather, host = self.gather_mode(layout), HOST if self.offloads else ""
        masters = "masters" if precision.separate_masters else "weights"
        parts = [
            sharded(name=f"{host}{masters}", bytes_per_parameter=4),
            sharded(name=f"{host}gradients", bytes_per_parameter=4),
            sharded(name=f"{host}optimizer", bytes_per_parameter=optimizer_bytes),
        ]
        # Unsharded from the forward pass to the end of the backward pass; or, by block, at once.
        num_gathered = 1 + max(self.forward_prefetch, self.backward_prefetch)
        by_block = partial(count_unsharded, engine=self, num_gathered=num_gathered)
        gathered = by_block if gather == "block" else cut_flat
        parts.append(
            StatePart(name="weights", bytes_per_parameter=precision.weight_bytes, cut=gathered)
        )
        if gather == "step":  # summed in fp32 until the last backward pass
            parts.append(StatePart(name="gradients", bytes_per_parameter=4))
        else:  # FSDP2 keeps the last reduced gradients until the next micro-batch has gradients
            parts.append(StatePart(name="gradients", bytes_per_parameter=4, cut=cut_root))
        return parts

    def memory(self, state: StateOnDevice, shards: Shards, degrees: Degrees) -> EngineMemory:
        from .fsdp2_memory import Fsdp2Memory

        return Fsdp2Memory(self, state, shards, degrees)

    def build(
        self,
        objective: Objective,
        optimizer: OptimizerConfig,
        precision: Precision,
        parallel: Parallel,
    ) -> Engine:
        config = self.for_ranks(parallel.data.size)
        if isinstance(config, OneRankConfig):
            return config.build(objective, optimizer, precision, parallel)
        return Fsdp2(self, objective, optimizer, precision, parallel)


class Fsdp2:
    def __init__(
        self,
        config: Fsdp2Config,
        objective: Objective,
        optimizer: OptimizerConfig,
        precision: Precision,
        parallel: Parallel,
    ) -> None:
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        from ...models.config.precision import compute_dtype
        from ...models.layers.fp8_gather import gather_matrices
        from .groups import engine_groups, local_shards, parameter_groups
        from .objective import parameters
        from .optimizers.moving_average import MovingAverage
        from .outside.frozen import Frozen
        from .outside.full_precision import FullPrecision
        from .pieces import FragmentBuilder
        from .shard_groups import ShardGroups

        model = objective.model
        fp32 = model.full_precision(precision)
        shards, all_groups = local_shards(model), parameter_groups(model, optimizer, fp32)
        groups = [
            mesh_group
            for group in engine_groups(all_groups)
            for mesh_group in split_by_mesh(group, config.shard_ranks)
        ]
        self.frozen = Frozen(model, fp32, all_groups, shards, precision, parallel)
        self.fp32 = FullPrecision(model, all_groups, optimizer, shards, parallel)
        self.device = parallel.device
        self.dtype = compute_dtype(precision)
        self.ranks = parallel.data.size
        self.replicas = parallel.replicas.size
        self.local_shards = shards
        self.shards = ShardGroups(parallel, config.shard, config.layers)
        self.clip = optimizer.clip
        self.updates = 0

        self.gather = config.gather_mode(parallel.pipe.layout)
        root_sharding: dict[str, Any] = {
            "mesh": self.shards.grid(None).mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=compute_dtype(precision) if precision.separate_masters else None,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # loss weights stay fp32
            ),
            "reshard_after_forward": False,
        }
        self.master_device = parallel.device
        if config.offloads:
            self.master_device, pinned = torch.device("cpu"), parallel.device.type == "cuda"
            root_sharding["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)
        blocks = model.typed_blocks()
        sharding = {}
        layers = map(int, model.blocks)
        for number, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
            num_later_layers = len(blocks) - 1 - number
            sharding[block] = {
                **root_sharding,
                "mesh": self.shards.grid(layer).mesh,
                "reshard_after_forward": self.gather == "block"
                and config.reshards(layer, num_later_layers),
            }
            if parallel.axes.experts.size > 1:
                shard_experts(block, self.shards.grid(layer, experts=True), sharding[block])
        config.compile_blocks(model, parallel.device)
        for block in blocks:
            fully_shard(block, **sharding[block])
        prefetch(blocks, config.forward_prefetch, config.backward_prefetch)
        # A forward pass ends with the head, and the backward pass begins there: no second gather.
        self.root: Any = fully_shard(objective, **root_sharding)
        objective.to_empty(device=self.master_device)  # shards only
        if not config.offloads:  # torch would call hooks on the tensor in host memory
            gather_matrices(model)
        self.fp32.register_buffers()
        self.frozen.register_buffers()
        self.objective = objective
        self.parameters = parameters(objective)
        self.optimizer = optimizer.build(model, groups, self.parameters)
        averaged = optimizer.ema is not None
        self.fragment_builder = FragmentBuilder(self.optimizer, shards, groups, averaged=averaged)
        self.average = MovingAverage(optimizer.ema, self.device)

    def __call__(self, *inputs: Any) -> Sums:
        sums: Sums = self.objective(*inputs)
        return sums

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # By block and by micro-batch, every micro-batch is reduced into sharded fp32 sums.
        self.root.set_is_last_backward(last)
        if self.gather == "step":
            self.root.set_requires_gradient_sync(last)
            self.root.set_reshard_after_backward(last)
        (loss * self.ranks).backward()  # FSDP2 averages; the loop wants sums
        if last and self.replicas != self.ranks:  # experts are averaged over fewer ranks
            for path, parameter in self.parameters.items():
                if self.local_shards[path].experts and parameter.grad is not None:
                    parameter.grad.mul_(self.replicas / self.ranks)
        if last:
            self.fp32.reduce(1 / self.ranks)

    def gradients(self) -> list[Fragment]:
        import torch

        from .pieces import local

        for parameter in self.parameters.values():
            if parameter.grad is None:  # unused: it still decays, as under ZeRO
                parameter.grad = torch.zeros_like(parameter)
        pieces = self._pieces()
        gradients = [self.parameters[piece.parameter].grad for piece in pieces]
        flat = [local(gradient).view(-1) for gradient in gradients if gradient is not None]
        return self.fragment_builder.gradients(pieces, flat) + self.fp32.gradients()

    def step(self, lr: float, finite: torch.Tensor) -> None:
        self.optimizer.set_lr(lr)
        self.optimizer.step_if(finite.to(self.master_device))
        self.fp32.step(lr, finite)
        self.discard()

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.fp32.discard()

    def fragments(self) -> list[Fragment]:
        outside = self.fp32.fragments() + self.frozen.fragments()
        return self.fragment_builder.fragments(self._pieces()) + outside

    def loaded(self, steps: int) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in self.objective.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation's unsharded weights are older than the shards
        self.updates = steps
        self.optimizer.loaded(steps)
        self.fp32.loaded(steps)
        self.frozen.loaded()
        self.average.loaded(steps)

    def _pieces(self) -> list[ParameterPiece]:
        from .pieces import ParameterPiece, local

        pieces = []
        for path, parameter in self.parameters.items():
            experts = self.local_shards[path].experts
            grid = self.shards.grid(parse_layer_number(path), experts=experts)
            if numel := local(parameter).numel():
                pieces.append(
                    ParameterPiece(
                        parameter=path,
                        tensor=parameter,
                        begin=0,
                        start=grid.first_element(parameter),
                        numel=numel,
                        writes=grid.replica == 0,
                    )
                )
        return pieces


def prefetch(blocks: Sequence[Any], forward: int, backward: int) -> None:
    """Make blocks gather others ahead. By default, torch prefetches one in the backward pass."""
    for number, block in enumerate(blocks):
        if forward:
            block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + forward])
        if backward != 1:
            previous = blocks[max(number - backward, 0) : number]
            block.set_modules_to_backward_prefetch(previous[::-1])
