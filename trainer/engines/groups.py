"""Parameter groups: parameters with the same learning rate, decay, states, copies and replicas.

All ranks that hold copies of a parameter make the same groups in the same order, so that ZeRO and
FSDP2 cut the groups identically, and one all-reduce of a group's gradient shards sums the copies.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ...console.errors import ConfigError, LayoutError, Problem
from ...models.accounting.count import build_meta
from ...models.model.model import Model
from ...models.parallel.groups import members
from ...models.parallel.local_shard import LocalShard
from ..checkpoints.kinds import AVERAGE
from .optimizers.base import ParameterGroup
from .optimizers.config import GroupConfig, OptimizerConfig
from .optimizers.decay import NO_DECAY

NEAREST = 3


def parameter_groups(
    model: Model, config: OptimizerConfig, fp32: Collection[str] = ()
) -> list[ParameterGroup]:
    """Return the groups of a model's parameters. Call before an engine wraps the model. `fp32`
    names parameters that are fp32 beside weights of half precision: they have groups of their own.
    """
    shards, states = local_shards(model), config.states(model)
    constant = NO_DECAY[config.decay](model)
    whole = model if len(model.chunks) == 1 else build_meta(model.config)
    chosen = assign(aliases(whole), config.groups)  # a pattern may name another stage's parameters
    names: dict[tuple[Any, ...], list[str]] = {}
    frozen = {number for number, group in enumerate(config.groups) if group.lr == 0}
    for name, shard in shards.items():
        held = () if chosen[name] in frozen else states[name]
        alike = (chosen[name], name in constant, held)
        key = (*alike, members(shard.copies), shard.experts, name in fp32)
        names.setdefault(key, []).append(name)
    return [_group(tuple(names[key]), key, config, shards[names[key][0]]) for key in sorted(names)]


def kept_states(groups: Sequence[ParameterGroup], *, averaged: bool) -> dict[str, tuple[str, ...]]:
    """Return the names of all tensors that are kept beside the master of every parameter: the
    optimizer's states, and the moving average."""
    average = (AVERAGE,) if averaged else ()
    return {
        name: () if group.frozen else (*group.states, *average)
        for group in groups
        for name in group.names
    }


def engine_groups(groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """Return the groups that an engine trains: the others are outside of it."""
    return [group for group in groups if not (group.frozen or group.full_precision)]


def check_trained(groups: Sequence[ParameterGroup], stage: str = "") -> None:
    """Raise if no parameter is left for the engine to train."""
    if not engine_groups(groups):
        raise LayoutError(
            f"optimizer.groups freezes all parameters{stage} (lr: 0)",
            hint="give at least one matrix of them a learning rate, or cut the layers elsewhere "
            "(layout.cuts)"
            if stage
            else "give at least one matrix a learning rate",
        )


def _group(
    names: tuple[str, ...], key: tuple[Any, ...], config: OptimizerConfig, shard: LocalShard
) -> ParameterGroup:
    number, constant, states, *_ = key
    own = config.groups[number] if number < len(config.groups) else None
    decay = config.weight_decay
    if own is not None and own.weight_decay is not None:
        decay = own.weight_decay
    return ParameterGroup(
        names=names,
        match=own.match if own is not None else None,
        lr=own.lr if own is not None else 1.0,
        weight_decay=0.0 if constant else decay,
        states=states,
        copies=shard.copies,
        experts=shard.experts,
        full_precision=key[-1],
    )


def describe_groups(
    model: Model, config: OptimizerConfig, fp32: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return a row for each parameter group of a model that may stand on the meta device."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    called = aliases(model)
    return [
        {
            "match": group.match,
            "names": sorted({_every_layer(called[name][-1]) for name in group.names}),
            "tensors": len(group.names),
            "parameters": sum(sizes[name] for name in group.names),
            "lr": config.lr * group.lr,
            "weight_decay": group.weight_decay,
            "states": list(group.states),
            "full_precision": group.full_precision,
        }
        for group in parameter_groups(model, config, fp32)
    ]


def local_shards(model: Model) -> Mapping[str, LocalShard]:
    """Return the local shard of each parameter. Call before an engine wraps the model."""
    if model.local_shards:
        return model.local_shards
    return {name: LocalShard(tuple(p.shape)) for name, p in model.named_parameters()}


def aliases(model: Model) -> dict[str, tuple[str, ...]]:
    """Return the names that a pattern can match, for each parameter: the parameter's own, and
    those with an operator's name or kind in place of `mixer.operator` and `mlp.operator`."""
    config = model.config
    places: dict[str, list[str]] = {}
    for number, layer in enumerate(config.layers):
        for branch, operator in (("mixer", layer.mixer), ("mlp", layer.mlp)):
            if operator is not None:
                kind = config.operators[operator].kind
                here = [f"blocks.{number}.{word}." for word in (operator, kind)]
                places[f"blocks.{number}.{branch}.operator."] = here
        if layer.shared is not None:
            kind = config.operators[layer.shared].kind
            places[f"shared.{layer.shared}."] = [f"shared.{kind}."]
    found = {}
    for name, _ in model.named_parameters():
        place = re.match(r"blocks\.\d+\.(mixer|mlp)\.operator\.|shared\.[^.]+\.", name)
        others = places[place[0]] if place is not None else []
        found[name] = (name, *(other + name[place.end() :] for other in others if place))
    return found


def assign(names: Mapping[str, Sequence[str]], groups: Sequence[GroupConfig]) -> dict[str, int]:
    """Return the number of the first group that matches each parameter; len(groups) for none."""
    chosen = {
        name: next((n for n, group in enumerate(groups) if _matches(group, called)), len(groups))
        for name, called in names.items()
    }
    unused = [number for number in range(len(groups)) if number not in chosen.values()]
    if unused:
        problems = [Problem(f"groups.{n}.match", _unmatched(groups[n], names)) for n in unused]
        raise ConfigError("the optimizer", problems)
    return chosen


def _matches(group: GroupConfig, called: Sequence[str]) -> bool:
    return any(fnmatchcase(name, group.match) for name in called)


def _unmatched(group: GroupConfig, names: Mapping[str, Sequence[str]]) -> str:
    if any(_matches(group, called) for called in names.values()):
        return f"`{group.match}` matches only parameters of the groups before it"
    known = sorted({pattern for called in names.values() for pattern in _patterns(called)})
    near = difflib.get_close_matches(group.match, known, n=NEAREST, cutoff=0.3)
    hint = f"; the nearest are {', '.join(near)}" if near else ""
    return f"no parameter's name matches `{group.match}`{hint}"


def _patterns(called: Sequence[str]) -> Iterator[str]:
    """Yield patterns that would match a parameter, layer numbers replaced by `*`."""
    for name in called:
        words = _every_layer(name).split(".")
        for length in range(2 if words[0] == "blocks" else 1, len(words) + 1):
            tail = "" if length == len(words) else ".*"
            yield ".".join(words[:length]) + tail


def _every_layer(name: str) -> str:
    """Return the pattern of a parameter of every layer: numbers become `*`."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
