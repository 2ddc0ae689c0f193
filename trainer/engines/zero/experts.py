"""Split experts under DeepSpeed's ZeRO 1 and 2.

DeepSpeed treats as experts the parameters that carry a mark, and sums their gradients and shards
their state over a process group of their own. It does so only if it finds a layer of its own class
in the model, which it also asks for the process groups. headrace's operators are of another class.
So a layer of DeepSpeed's class, without parameters, stands in the model while DeepSpeed starts.

DeepSpeed divides the sums of experts' gradients by the size of the data axis, as all others, so the
engine's factor is right for both.

Beside state.py this is the only file that reads DeepSpeed's private fields.
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
    """Make DeepSpeed, which starts inside, take this rank's experts as such."""
    experts = [parameter for name, parameter in named.items() if shards[name].experts]
    if not experts:
        yield
        return
    name = f"ep_size_{parallel.axes.experts.size}"  # DeepSpeed reads the number
    for parameter in experts:
        parameter.allreduce, parameter.group_name = False, name  # type: ignore[attr-defined]
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        if wanted.experts:
            group.update(moe=True, name=name)
    module.add_module("deepspeed_experts", _layer(name, parallel))
    try:
        yield
    except (AssertionError, AttributeError, KeyError, TypeError) as error:
        raise _changed(f"it does not start with them: {error!r}") from error
    finally:
        del module.deepspeed_experts


def check(engine: Any, groups: Sequence[ParameterGroup], parallel: Parallel) -> None:
    """Raise unless DeepSpeed shards each parameter group over the ranks that hold it."""
    wanted = [parallel.replicas if group.experts else parallel.data for group in groups]
    found = list(getattr(engine.optimizer, "real_dp_process_group", ()))
    if [axis.group for axis in wanted] != found:
        raise _changed("it does not shard experts over the process group that its layer gave it")


def _layer(name: str, parallel: Parallel) -> nn.Module:
    """Return a layer of DeepSpeed's class that has no parameters and gives it process groups."""
    try:
        from deepspeed.moe.layer import MoE
        from deepspeed.utils import groups

        registered = {
            "experts": groups._EXPERT_PARALLEL_GROUP,
            "replicas": groups._EXPERT_DATA_PARALLEL_GROUP,
        }
    except (ImportError, AttributeError) as error:
        raise _changed(str(error)) from None

    class Layer(MoE):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = parallel.axes.experts.size

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            for kind, axis in (("experts", parallel.axes.experts), ("replicas", parallel.replicas)):
                registered[kind].clear()
                registered[kind][name] = axis.group

    return Layer()


def _changed(what: str) -> MissingError:
    import deepspeed

    return MissingError(
        f"DeepSpeed {deepspeed.__version__} differs from the version that headrace splits experts "
        f"with: {what}",
        hint="install the version that constraints.txt names, or use engine.kind=fsdp2 or "
        "layout.ep=1",
    )
