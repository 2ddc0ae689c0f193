"""The whole state of an engine, from the live memory of all ranks (see layouts.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headrace.models.config.options.precision import PRECISIONS
from headrace.models.parallel.local_shard import LocalShard
from headrace.models.parallel.sharding import slice_local_shard
from headrace.trainer.checkpoints.kinds import MASTER
from headrace.trainer.engines.engine import Engine
from headrace.trainer.engines.objective import parameters
from headrace.trainer.layout.groups import Parallel


def gathered(engine: Engine, parallel: Parallel) -> dict[str, torch.Tensor]:
    """Return the whole state on rank 0, from the elements of all ranks' fragments: independent of
    torch. Other ranks return nothing."""
    mine = [(f.key, f.shard, f.start, f.data.clone().cpu()) for f in engine.fragments()]
    everyone: list[Any] | None = [None] * parallel.world if parallel.first else None
    dist.gather_object(mine, everyone, group=parallel.control)
    whole: dict[str, torch.Tensor] = {}
    for held in everyone or ():
        for key, part, start, data in held:
            flat = whole.setdefault(key, torch.full(part.shape, torch.nan)).view(-1)
            flat[numbered(part)[start : start + data.numel()]] = data
    return whole


def numbered(part: LocalShard) -> torch.Tensor:
    """Return the index in the whole tensor of each element of a local shard."""
    return slice_local_shard(part, torch.arange(math.prod(part.shape)).view(part.shape)).flatten()


def oracle(engine: Engine, parallel: Parallel) -> dict[str, torch.Tensor]:
    """Return the whole state as DeepSpeed and torch gather it, joined over the tensor axis."""
    from torch.distributed.tensor import DTensor

    mine: dict[str, Any] = {}
    shards = engine.objective.model.local_shards
    masters = getattr(engine, "parameters", parameters(engine.objective))
    for name, parameter in masters.items():
        for kind in (MASTER, *engine.fragment_builder.states[name]):  # type: ignore[attr-defined]
            whole = _full(engine, parameter, kind, DTensor).clone()
            mine[f"{kind}.{name}"] = (shards[name], whole)
    for name, parameter in engine.fp32.parameters.items():  # type: ignore[attr-defined]
        states = engine.fp32.optimizer.state[parameter]  # type: ignore[attr-defined]
        for kind, tensor in {MASTER: parameter.detach(), **states}.items():
            if kind != "step":
                mine[f"{kind}.{name}"] = (shards[name], tensor.clone())
    frozen = engine.frozen  # type: ignore[attr-defined]
    for name in frozen.weights.keys() - frozen.masters.keys():  # fp32: not rounded
        mine[f"{MASTER}.{name}"] = (shards[name], frozen.weights[name].clone())
    everyone: list[Any] = [None] * parallel.world
    dist.all_gather_object(everyone, mine, group=parallel.control)
    state: dict[str, torch.Tensor] = {}
    for held in everyone:
        for key, (part, tensor) in held.items():
            whole = state.setdefault(key, torch.full(part.shape, torch.nan))
            whole.view(-1)[numbered(part)] = tensor.flatten()
    return state


def _full(engine: Any, parameter: nn.Parameter, kind: str, dtensor: type) -> torch.Tensor:
    if isinstance(parameter, dtensor):
        tensor = parameter
        if kind != MASTER:  # Muon has no state for an empty shard, so it may have to be made
            tensor = engine.optimizer.state_tensors(parameter, [kind])[kind]
        return tensor.detach().full_tensor()  # type: ignore[no-any-return,union-attr]
    if not hasattr(engine, "engine"):  # FSDP2 on one rank
        tensor = engine.optimizer.state_tensors(parameter, [kind])[kind] if kind != MASTER else None
        return (parameter if tensor is None else tensor).detach()
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    wrapper = engine.engine.optimizer
    if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        if kind == "master":
            return safe_get_full_fp32_param(parameter)  # type: ignore[no-any-return]
        return safe_get_full_optimizer_state(parameter, kind)  # type: ignore[no-any-return]
    return parameter.detach() if kind == "master" else engine.optimizer.state[parameter][kind]


def live_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the weights of the forward pass, gathered if they are sharded."""
    from torch.distributed.tensor import DTensor

    weights = {}
    for name, parameter in parameters(engine.objective).items():
        if isinstance(parameter, DTensor):
            weights[name] = parameter.detach().full_tensor()
        elif hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                weights[name] = parameter.detach().clone()
        else:
            weights[name] = parameter.detach()
    buffers = engine.objective.model.named_buffers()
    return weights | {name: buffer.detach() for name, buffer in buffers}


def fp32_in_use(engine: Engine, parallel: Parallel, run: Callable[[], object]) -> dict[str, bool]:
    """Return, for each parameter that must not be rounded, whether a forward pass of `run` uses the
    bits of the master on every rank, and whether bf16 would round them."""
    model = engine.objective.model
    fp32 = sorted(model.full_precision(PRECISIONS["bf16"]))
    masters = {f.parameter: f.data.clone() for f in engine.fragments() if f.key.startswith(MASTER)}
    used: dict[str, torch.Tensor] = {}

    def keep_parameter(module: nn.Module, _: object, name: str, attribute: str) -> None:
        used.setdefault(name, getattr(module, attribute).detach().clone().flatten())

    hooks = []
    for name in fp32:
        path, _, attribute = name.rpartition(".")
        hook = partial(keep_parameter, name=name, attribute=attribute)
        hooks.append(model.get_submodule(path).register_forward_pre_hook(hook))
    run()
    for hook in hooks:
        hook.remove()
    result = {}
    for name, bits in used.items():
        everyone: list[Any] = [None] * parallel.data.size
        dist.all_gather_object(everyone, (bits, masters[name]), group=parallel.data.group)
        result[name] = all(torch.equal(bits, item) for pair in everyone for item in pair)
        result[f"{name}, rounded"] = torch.equal(bits, bits.bfloat16().float())
    return result
