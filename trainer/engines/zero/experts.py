"""Make DeepSpeed shard split experts in ZeRO 1 and 2.

DeepSpeed treats marked parameters as experts: it sums their gradients and shards their state over a
separate process group. But it does so only if the model contains a layer of DeepSpeed's MoE class,
which also supplies the process groups, and headrace's operators have a different class. So the
model contains such a layer, without parameters, while DeepSpeed starts.

DeepSpeed divides all sums of gradients by the size of the data axis, so the engine's factor is also
right for experts.

Only this file and state.py read DeepSpeed's private fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ....console.errors import MissingError
from ....models.parallel.local_shard import LocalShard
from ...layout.groups import Parallel
from ..optimizers.base import ParameterGroup


@contextmanager
def split_experts(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[ParameterGroup],
    named: Mapping[str, nn.Parameter],
    shards: Mapping[str, LocalShard],
    parallel: Parallel,
) -> Iterator[None]:
    """Let DeepSpeed, which starts inside the context, treat this rank's experts as experts."""
    experts = [parameter for name, parameter in named.items() if shards[name].experts]
    if not experts:
        yield
        return
    group_name = f"ep_size_{parallel.axes.experts.size}"  # DeepSpeed parses the number
    for parameter in experts:
        parameter.allreduce, parameter.group_name = False, group_name  # type: ignore[attr-defined]
    for torch_group, group in zip(optimizer.param_groups, groups, strict=True):
        if group.experts:
            torch_group.update(moe=True, name=group_name)
    module.add_module("deepspeed_experts", _moe_layer(group_name, parallel))
    try:
        yield
    except (AssertionError, AttributeError, KeyError, TypeError) as error:
        raise _changed_error(f"it does not start with them: {error!r}") from error
    finally:
        del module.deepspeed_experts


def check(engine: Any, groups: Sequence[ParameterGroup], parallel: Parallel) -> None:
    """Raise unless DeepSpeed shards all parameter groups over the ranks that hold them."""
    axes = [parallel.replicas if group.experts else parallel.data for group in groups]
    process_groups = list(getattr(engine.optimizer, "real_dp_process_group", ()))
    if [axis.group for axis in axes] != process_groups:
        raise _changed_error(
            "it does not shard experts over the process group that its layer gave it"
        )


def _moe_layer(group_name: str, parallel: Parallel) -> nn.Module:
    """Return a layer of DeepSpeed's MoE class that has no parameters and registers process
    groups."""
    try:
        from deepspeed.moe.layer import MoE
        from deepspeed.utils import groups

        registered = {
            "experts": groups._EXPERT_PARALLEL_GROUP,
            "replicas": groups._EXPERT_DATA_PARALLEL_GROUP,
        }
    except (ImportError, AttributeError) as error:
        raise _changed_error(str(error)) from None

    class ProcessGroupLayer(MoE):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = parallel.axes.experts.size

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            for kind, axis in (("experts", parallel.axes.experts), ("replicas", parallel.replicas)):
                registered[kind].clear()
                registered[kind][group_name] = axis.group

    return ProcessGroupLayer()


def _changed_error(difference: str) -> MissingError:
    import deepspeed

    return MissingError(
        f"DeepSpeed {deepspeed.__version__} differs from the version that headrace splits experts "
        f"with: {difference}",
        hint="install the version that constraints.txt names, or use engine.kind=fsdp2 or "
        "layout.ep=1",
    )
