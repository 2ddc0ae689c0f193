"""DeepSpeed: ZeRO 0 to 3 over the data axis.

DeepSpeed owns the flat buffers, the reduction of gradients and the update. We own the optimizer's
arithmetic (torch's AdamW), when an update happens, and where every element of the state lies:
that is in deepspeed_state.py, the one file that reads DeepSpeed's private fields.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...console.errors import LayoutError, MissingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ...models.accounting.state import BytesPerParameter, StatePart
    from ...models.parallel.sharding import LocalShard
    from ...models.precision import Precision
    from ..checkpoints.fragments import Fragment
    from ..layout.config import LayoutConfig
    from ..layout.groups import Parallel
    from .engine import Update
    from .objective import Objective, Sums
    from .optimizer import OptimizerConfig

LARGEST_BUCKET = {"cuda": 200_000_000, "cpu": 1 << 22}
"""Elements that are reduced or gathered at once, at most: DeepSpeed allocates as many in every
step. On CPU it is what the allocator keeps, and does not get from the system again each time."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """DeepSpeed's ZeRO."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero: Literal[0, 1, 2, 3] = 1
    """What is divided among the data-parallel processes: 0 nothing, 1 masters and moments,
    2 gradients as well, 3 weights as well."""

    def check(self, layout: LayoutConfig, processes: int, precision: Precision) -> None:
        if self.zero == 0 and precision.separate_masters:
            raise LayoutError(
                "DeepSpeed without ZeRO (engine.zero=0) sums bf16 gradients in bf16",
                hint="use engine.zero=1, which sums them in fp32, or precision=fp32",
            )

    def describe(self) -> str:
        return f"DeepSpeed ZeRO-{self.zero}"

    def state_layout(
        self, precision: Precision, optimizer_bytes: BytesPerParameter, device: str
    ) -> list[StatePart]:
        """Return the parts of the state that a rank holds."""
        from .deepspeed_memory import state_layout

        return state_layout(self.zero, precision, optimizer_bytes, LARGEST_BUCKET[device])

    def build(
        self,
        objective: Objective,
        optimizer: OptimizerConfig,
        precision: Precision,
        parallel: Parallel,
    ) -> DeepSpeed:
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
        from . import deepspeed_state
        from . import optimizer as adamw
        from .objective import parameters, parts, undecayed
        from .shares import Shares

        # DeepSpeed insists on it, and whoever starts a single process does not set it.
        os.environ.setdefault("LOCAL_RANK", str(parallel.device.index or 0))
        here, spared = parts(objective), undecayed(objective)
        settings = _settings(config, optimizer, precision, _bucket(here, parallel.device.type))
        if precision.separate_masters:
            objective.to(precision.compute)  # on the meta device: what is made has half the bytes
        if config.zero == 3:
            _partition(objective, settings, parallel)
        else:
            objective.to_empty(device=parallel.device)
        self.objective = objective
        self.named = named = parameters(objective)
        self.shares = Shares(here, parallel.axes.tensor)
        for name, parameter in named.items():
            # Hooks, because ZeRO divides a gradient as soon as it has it; and the mark by which
            # DeepSpeed counts in its norm, on every rank, what each has a part of.
            if name in self.shares.shared:
                parameter.register_hook(self.shares.summed)
            parameter.tensor_model_parallel = name not in self.shares.shared  # type: ignore[attr-defined]
        self.ranks = parallel.data.size
        # Without ZeRO, DeepSpeed would clip without telling the norm: we do it.
        self.plain = config.zero == 0
        self.clip = optimizer.clip
        self.optimizer = adamw.build(named, spared, optimizer)
        self.updates = 0
        self.engine, *_ = deepspeed.initialize(
            model=objective,
            optimizer=self.optimizer,
            config=settings,
            dist_init_required=False,
            mpu=Groups(parallel),
        )
        self.state = deepspeed_state.find(self.engine, self.optimizer, named, here, parallel.data)

    def __call__(self, *inputs: Any) -> Sums:
        sums: Sums = self.engine(*inputs)
        return sums

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the ranks; the loop wants sums.
        self.engine.backward(loss * self.ranks, scale_wrt_gas=False)

    def update(self, lr: float) -> Update:
        from . import optimizer as adamw
        from .engine import Update

        adamw.set_lr(self.optimizer, lr)
        if self.plain:
            norm = self._clip()
            if not math.isfinite(norm):
                self.engine.zero_grad()
                return Update(norm, applied=False)
            self.engine.step()
        else:
            self.engine.step()
            norm = float(self.engine.get_global_grad_norm())
        applied = bool(self.engine.was_step_applied())
        if not applied:
            # ZeRO-3 returns before it has gathered what the next forward pass counts on.
            self.state.refresh()
        self.updates += applied
        return Update(norm, applied)

    def fragments(self) -> list[Fragment]:
        return self.state.fragments()

    def loaded(self, updates: int) -> None:
        from . import optimizer as adamw

        self.updates = updates
        adamw.set_updates(self.optimizer, updates)
        self.state.refresh()
        self.engine.global_steps = updates
        self.engine.micro_steps = updates

    def _clip(self) -> float:
        import torch

        from .shares import clip

        for parameter in self.named.values():
            if parameter.grad is None:  # unused: decayed as under ZeRO, not passed over
                parameter.grad = torch.zeros_like(parameter)
        gradients = {n: p.grad for n, p in self.named.items() if p.grad is not None}
        norm = self.shares.norm(gradients)
        clip(gradients, norm, self.clip)
        return norm


class Groups:
    """The groups, under the names by which DeepSpeed asks for them (its `mpu`)."""

    def __init__(self, parallel: Parallel) -> None:
        self.data, self.model = parallel.data, parallel.axes.tensor

    def get_data_parallel_group(self) -> Any:
        return self.data.group

    def get_data_parallel_rank(self) -> int:
        return self.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self.data.size

    def get_model_parallel_group(self) -> Any:
        return self.model.group

    def get_model_parallel_rank(self) -> int:
        return self.model.rank

    def get_model_parallel_world_size(self) -> int:
        return self.model.size


def _settings(
    config: DeepSpeedConfig, optimizer: OptimizerConfig, precision: Precision, bucket: int
) -> dict[str, Any]:
    half = precision.separate_masters
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # counters only: the loop owns the batch
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.clip if config.zero else 0.0,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": config.zero,
            # Before ZeRO-3, what DeepSpeed calls so is an all-reduce of a copy, and a copy back.
            "reduce_scatter": config.zero == 3,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
        },
        "bf16": {"enabled": half, "check_grad_overflow": half},
    }
    if config.zero:  # DeepSpeed has no other sums without ZeRO: then weights are fp32 as well
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _partition(objective: Objective, settings: dict[str, Any], parallel: Parallel) -> None:
    """Make the parameters module by module, and cut each at once: whole they never stand."""
    import deepspeed
    import torch
    from torch import nn

    cut = None
    for module in objective.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty_like(parameter, device=parallel.device)
            setattr(module, name, nn.Parameter(empty))
        own = list(module.parameters(recurse=False))
        if cut is not None:
            cut(param_list=own)
        elif own:
            groups = {"data_parallel_group": parallel.data.group, "mpu": Groups(parallel)}
            deepspeed.zero.Init(
                module=nn.ParameterList(own), config_dict_or_path=settings, **groups
            )
            cut = own[0].convert_to_zero_parameters  # type: ignore[attr-defined]


def _bucket(parts: Mapping[str, LocalShard], device: str) -> int:
    from .deepspeed_memory import bucket_elements

    numel = sum(math.prod(part.local) for part in parts.values())
    return bucket_elements(numel, LARGEST_BUCKET[device])


def _import(device: str) -> Any:
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found no GPU
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
        # It would compile a shared-memory all-reduce with a C++ compiler, which a machine need
        # not have, and probe for a dozen more operators that we never use.
        deepspeed.ops.__compatible_ops__ = {}
    return deepspeed
