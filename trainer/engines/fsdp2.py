"""FSDP2: torch's own sharding, block by block. It needs torch alone.

Under tensor parallelism it shards each local shard over the data axis; under expert parallelism, a
rank's experts over their replicas.

The sharded fp32 parameters are the masters. Each block is gathered before it computes, in the
compute precision (matrices in FP8 travel so: models/layers/fp8_gather.py), and its gradients are
summed in fp32. `gather` chooses how long it stays whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from ...console.errors import ConfigProblem, ConfigProblems, LayoutError
from .config import EngineConfig, StateOnDevice
from .shard_groups import LayerShards, check_shard, layer_of, overlapping, shard_of, with_one_mesh
from .traffic import KeptWhole, Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ...models.accounting.level import EngineMemory
    from ...models.accounting.state import BytesPerParameter, Degrees, Shards, StatePart
    from ...models.config.options.precision import Precision
    from ...models.model.block import Block
    from ..checkpoints.fragments import Fragment
    from ..layout.config import LayoutConfig
    from ..layout.groups import Parallel
    from .objective import Objective, Sums
    from .optimizers.config import OptimizerConfig
    from .pieces import Piece
    from .shard_groups import Grid

Gather = Literal["block", "micro-batch", "step"]
BLOCK_LAUNCHES, MESSAGE_LAUNCHES = 40, 55
"""Launches that take as long as FSDP2's own work in a pass of a block, and in each of its gathers
and sums. Measured on a CPU with messages that send nothing."""


@dataclass(frozen=True, kw_only=True)
class Fsdp2Config(EngineConfig):
    """Torch's fully sharded data parallelism."""

    chooses_layers = True

    kind: Literal["fsdp2"] = "fsdp2"
    shard: int | None = None
    """Ranks that share one copy of the state; more copies are replicas (HSDP). None: all ranks."""
    gather: Gather | None = None
    """When weights are gathered, and gradients reduced. `block`: for each pass of a block; a rank
    holds one block whole. `micro-batch`: once for each micro-batch; it holds all weights of its
    stage whole. `step`: once for a step; it holds weights and gradients whole. Default: `step` for
    a pipeline, whose stages are small, else `block`."""
    keep_last: int = 0
    """Last layers whose weights stay whole from the forward to the backward pass, with
    `gather: block`. The backward pass begins with them: one gather less for each layer."""
    layers: tuple[LayerShards, ...] = ()
    """Layers with a choice of their own: `{layers: [0, 7], reshard: false, shard: 8}`. The others
    follow `gather`, `shard` and `keep_last`."""
    forward_prefetch: int = 0
    """Blocks gathered ahead of the block that runs forward, with `gather: block`."""
    backward_prefetch: int = 1
    """Blocks gathered ahead of the block that runs backward, with `gather: block`."""
    offload: Literal["cpu"] | None = None
    """`cpu`: sharded weights, gradients and optimizer states lie in host memory, and the CPU
    updates them with headrace's AdamW. Muon is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard is not None and self.shard < 1:
            raise ValueError(f"shard must be at least 1, not {self.shard}")
        for name, least in (("keep_last", 0), ("forward_prefetch", 0), ("backward_prefetch", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if twice := [ConfigProblem("layers", text) for text in overlapping(self.layers)]:
            raise ConfigProblems(twice)

    @property
    def offloads(self) -> bool:
        return self.offload is not None

    def check(self, layout: LayoutConfig, processes: int, precision: Precision) -> None:
        ranks = processes // layout.shards * layout.cp
        own = [(f"engine.layers.{n}.shard", each.shard) for n, each in enumerate(self.layers)]
        for name, shard in [("engine.shard", self.shard), *own]:
            if shard is not None:
                check_shard(name, shard, ranks, layout)
        by_block = {"keep_last": 0, "forward_prefetch": 0, "backward_prefetch": 1}
        changed = [
            f"{name}={getattr(self, name)}"
            for name, default in by_block.items()
            if getattr(self, name) != default
        ]
        changed += [f"layers.{n}.reshard=false" for n, e in enumerate(self.layers) if not e.reshard]
        if changed and self.gather_of(layout) != "block":
            raise LayoutError(
                f"engine.{changed[0]} needs weights that are gathered block by block; "
                f"engine.gather={self.gather_of(layout)} gathers all at once",
                hint=f"set engine.gather=block, or leave {changed[0].partition('=')[0]} out",
            )

    @classmethod
    def candidates(cls, shard: int | None) -> list[Self]:
        gathers: tuple[Gather, ...] = get_args(Gather)
        return [cls(shard=shard, gather=gather) for gather in gathers]

    @classmethod
    def fewest_messages(cls) -> Self:
        return cls(gather="step")

    def choices(self, layout: LayoutConfig) -> dict[str, object]:
        return {"gather": self.gather_of(layout), "shard": self.shard or "all"}

    def traffic(self, layout: LayoutConfig, device: str) -> Traffic:
        traffic = partial(
            Traffic,
            shard=self.shard,
            pass_launches=BLOCK_LAUNCHES,
            message_launches=MESSAGE_LAUNCHES,
        )
        match self.gather_of(layout):
            case "block":
                return traffic(
                    forward=("gather",), backward=("reduce", "gather"), may_stay_whole=True
                )
            case "micro-batch":
                return traffic(forward=("gather",), backward=("reduce",))
            case "step":
                return traffic(first_forward=("gather",), last_backward=("reduce",))

    def kept_whole(self, layout: LayoutConfig) -> KeptWhole:
        return KeptWhole(blocks=self.gather_of(layout) != "block", outside=True)

    @property
    def layer_shards(self) -> tuple[LayerShards, ...]:
        return self.layers

    def with_layer_shards(self, spans: Sequence[LayerShards]) -> Self:
        return replace(self, layers=tuple(spans))

    def describe_in(self, layout: LayoutConfig) -> str:
        return f"{self.describe()}, gather by {self.gather_of(layout)}"

    def describe(self) -> str:
        shards, spans = f", shards of {self.shard}" if self.shard else "", len(self.layers)
        shards += f", {spans} span{'s' * (spans > 1)} of layers apart" if spans else ""
        shards += ", on the CPU between passes" * self.offloads
        return f"FSDP2{shards}{', compiled' if self.compile else ''}"

    def state_layout(
        self,
        precision: Precision,
        optimizer_bytes: BytesPerParameter,
        device: str,
        layout: LayoutConfig,
    ) -> list[StatePart]:
        """Return the parts of the state that a rank holds: fp32 parameters, sharded by rows."""
        from ...models.accounting.state import (
            HOST,
            StatePart,
            cut_flat,
            cut_root,
            cut_rows,
        )
        from .fsdp2_memory import whole_by_block

        sharded = partial(
            StatePart, sharded_over=("dp", "cp"), shard_ranks=self.shard_ranks, cut=cut_rows
        )
        gather, host = self.gather_of(layout), HOST if self.offloads else ""
        masters = "masters" if precision.separate_masters else "weights"
        parts = [
            sharded(name=f"{host}{masters}", bytes_per_parameter=4),
            sharded(name=f"{host}gradients", bytes_per_parameter=4),
            sharded(name=f"{host}optimizer", bytes_per_parameter=optimizer_bytes),
        ]
        # Gathered from the forward pass to the end of the backward pass; or, by block, at once.
        ahead = 1 + max(self.forward_prefetch, self.backward_prefetch)
        by_block = partial(whole_by_block, engine=self, ahead=ahead)
        gathered = by_block if gather == "block" else cut_flat
        parts.append(
            StatePart(name="weights", bytes_per_parameter=precision.weight_bytes, cut=gathered)
        )
        if gather == "step":  # summed in fp32 until the last backward pass
            parts.append(StatePart(name="gradients", bytes_per_parameter=4))
        else:  # FSDP2 keeps what it reduced last until the next micro-batch has gradients
            parts.append(StatePart(name="gradients", bytes_per_parameter=4, cut=cut_root))
        return parts

    def memory(self, state: StateOnDevice, shards: Shards, degrees: Degrees) -> EngineMemory:
        from .fsdp2_memory import Fsdp2Memory

        return Fsdp2Memory(self, state, shards, degrees)

    def shard_ranks(self, parameter: str) -> int | None:
        """Return the ranks that share one copy of a parameter's state; None: all."""
        return shard_of(self.layers, layer_of(parameter), self.shard)

    def resharded(self, layer: int, left: int) -> bool:
        """Return True if `gather: block` shards a layer again after its forward pass; `left` layers
        of the rank follow it."""
        own = [span.reshard for span in self.layers if layer in span]
        return left >= self.keep_last and all(own)

    def gather_of(self, layout: LayoutConfig) -> Gather:
        return self.gather or ("block" if layout.holds_all_layers else "step")

    def build(
        self,
        objective: Objective,
        optimizer: OptimizerConfig,
        precision: Precision,
        parallel: Parallel,
    ) -> Fsdp2:
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
        from .pieces import Pieces
        from .shard_groups import ShardGroups

        model = objective.model
        fp32 = model.full_precision(precision)
        shards, all_groups = local_shards(model), parameter_groups(model, optimizer, fp32)
        trained = engine_groups(all_groups)
        groups = [each for group in trained for each in with_one_mesh(group, config.shard_ranks)]
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

        self.gather = config.gather_of(parallel.pipe.layout)
        wanted: dict[str, Any] = {
            "mesh": self.shards.of(None).mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=compute_dtype(precision) if precision.separate_masters else None,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # loss weights stay fp32
            ),
            "reshard_after_forward": False,
        }
        self.place = parallel.device
        if config.offloads:
            self.place, pinned = torch.device("cpu"), parallel.device.type == "cuda"
            wanted["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)
        blocks = model.typed_blocks()
        sharding = {}
        for left, name, block in zip(
            reversed(range(len(blocks))), model.blocks, blocks, strict=True
        ):
            layer = int(name)
            reshard = self.gather == "block" and config.resharded(layer, left)
            own = {"mesh": self.shards.of(layer).mesh, "reshard_after_forward": reshard}
            sharding[block] = {**wanted, **own}
            if parallel.axes.experts.size > 1:
                shard_experts(block, self.shards.of(layer, experts=True), sharding[block])
        config.compile_blocks(model, parallel.device)
        for block in blocks:
            fully_shard(block, **sharding[block])
        prefetch(blocks, config.forward_prefetch, config.backward_prefetch)
        # A forward pass ends with the head, and its backward pass begins there: no second gather.
        self.root: Any = fully_shard(objective, **wanted)
        objective.to_empty(device=self.place)  # shards only
        if not config.offloads:  # torch's hooks would be those of the host's tensor
            gather_matrices(model)
        self.fp32.give_back()
        self.frozen.give_back()
        self.objective = objective
        self.parameters = parameters(objective)
        self.optimizer = optimizer.build(model, groups, self.parameters)
        self.pieces = Pieces(self.optimizer, shards, groups, averaged=optimizer.ema is not None)
        self.average = MovingAverage(optimizer.ema, self.device)

    def __call__(self, *inputs: Any) -> Sums:
        sums: Sums = self.objective(*inputs)
        return sums

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # By block and by micro-batch, each micro-batch is reduced into sharded fp32 sums.
        self.root.set_is_last_backward(last)
        if self.gather == "step":
            self.root.set_requires_gradient_sync(last)
            self.root.set_reshard_after_backward(last)
        (loss * self.ranks).backward()  # FSDP2 averages; the loop wants sums
        if last and self.replicas != self.ranks:  # those of experts, over fewer ranks
            for name, parameter in self.parameters.items():
                if self.local_shards[name].experts and parameter.grad is not None:
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
        found = [self.parameters[piece.parameter].grad for piece in pieces]
        flat = [local(gradient).view(-1) for gradient in found if gradient is not None]
        return self.pieces.gradients(pieces, flat) + self.fp32.gradients()

    def step(self, lr: float, finite: torch.Tensor) -> None:
        self.optimizer.set_lr(lr)
        self.optimizer.step_if(finite.to(self.place))
        self.fp32.step(lr, finite)
        self.discard()

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.fp32.discard()

    def fragments(self) -> list[Fragment]:
        own = self.pieces.fragments(self._pieces())
        return own + self.fp32.fragments() + self.frozen.fragments()

    def loaded(self, steps: int) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in self.objective.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # whole weights of an evaluation are older than the shards
        self.updates = steps
        self.optimizer.loaded(steps)
        self.fp32.loaded(steps)
        self.frozen.loaded()
        self.average.loaded(steps)

    def _pieces(self) -> list[Piece]:
        from .pieces import Piece, local

        found = []
        for name, parameter in self.parameters.items():
            grid = self.shards.of(layer_of(name), experts=self.local_shards[name].experts)
            if numel := local(parameter).numel():
                found.append(
                    Piece(
                        parameter=name,
                        tensor=parameter,
                        begin=0,
                        start=grid.first_element(parameter),
                        numel=numel,
                        writes=grid.replica == 0,
                    )
                )
        return found


def shard_experts(block: Block, grid: Grid, sharding: dict[str, Any]) -> None:
    """Shard the experts of a block over their replicas, and the rest of their operators as the
    block."""
    from torch.distributed.fsdp import fully_shard

    for branch in block.branches():
        if branch.operator.experts:
            for child in branch.operator.children():  # a router: gathered once for both passes
                fully_shard(child, **{**sharding, "reshard_after_forward": False})
            fully_shard(branch.operator, **{**sharding, "mesh": grid.mesh})


def prefetch(blocks: Sequence[Any], forward: int, backward: int) -> None:
    """Make each block gather blocks ahead. torch itself gathers one ahead in the backward pass."""
    for number, block in enumerate(blocks):
        if forward:
            block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + forward])
        if backward != 1:
            before = blocks[max(number - backward, 0) : number]
            block.set_modules_to_backward_prefetch(before[::-1])
