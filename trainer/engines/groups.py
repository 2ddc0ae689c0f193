"""Group parameters with equal learning rate, decay, states, copies and replicas.

All ranks that hold copies of a parameter make the same groups in the same order, so that ZeRO and
FSDP2 cut the groups identically, and a single all-reduce of the gradient shards sums the copies.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ...console.errors import ConfigError, ConfigProblem, LayoutError
from ...models.accounting.count import build_meta
from ...models.model.model import Model
from ...models.parallel.groups import list_ranks
from ...models.parallel.local_shard import LocalShard
from ..checkpoints.kinds import AVERAGE
from .optimizers.base import ParameterGroup
from .optimizers.config import GroupConfig, OptimizerConfig
from .optimizers.decay import NO_DECAY

MAX_SUGGESTIONS = 3
UNTRAINED = -1
"""Number of the group of parameters that no optimizer trains."""


def parameter_groups(
    model: Model, config: OptimizerConfig, fp32: Collection[str] = ()
) -> list[ParameterGroup]:
    """Group a model's parameters. Call before an engine wraps the model.

    `fp32` names parameters that stay fp32 in a model of half precision; they are grouped apart.
    """
    shards, states = local_shards(model), config.states(model)
    no_decay = NO_DECAY[config.decay](model)
    # a pattern may name parameters of another stage
    full_model = model if len(model.chunks) == 1 else build_meta(model.config)
    numbers = assign_groups(find_aliases(full_model), config.groups)
    names: dict[tuple[Any, ...], list[str]] = {}
    frozen = {number for number, group in enumerate(config.groups) if group.lr == 0} | {UNTRAINED}
    numbers |= dict.fromkeys(untrained_parameters(model), UNTRAINED)
    for name, shard in shards.items():
        trained_states = () if numbers[name] in frozen else states[name]
        settings = (numbers[name], name in no_decay, trained_states)
        key = (*settings, list_ranks(shard.copies), shard.experts, name in fp32)
        names.setdefault(key, []).append(name)
    return [_group(tuple(names[key]), key, config, shards[names[key][0]]) for key in sorted(names)]


def untrained_parameters(model: Model) -> list[str]:
    """Return the names of parameters that have no gradient: the routers' correction biases."""
    parameters = model.named_parameters()
    return [name for name, parameter in parameters if not parameter.requires_grad]


def state_names(groups: Sequence[ParameterGroup], *, averaged: bool) -> dict[str, tuple[str, ...]]:
    """Return the state tensors by parameter, besides the master: the optimizer's states, and with
    `averaged` the moving average."""
    average = (AVERAGE,) if averaged else ()
    return {
        name: () if group.frozen else (*group.states, *average)
        for group in groups
        for name in group.names
    }


def engine_groups(groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """Return the groups that an engine trains; frozen and fp32 groups are outside."""
    return [group for group in groups if not (group.frozen or group.full_precision)]


def check_trained(groups: Sequence[ParameterGroup], stage: str = "") -> None:
    """Raise if the engine has no parameter to train."""
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
    number, has_no_decay, states, *_, full_precision = key
    settings = config.groups[number] if 0 <= number < len(config.groups) else None
    decay = config.weight_decay
    if settings is not None and settings.weight_decay is not None:
        decay = settings.weight_decay
    return ParameterGroup(
        names=names,
        match=settings.match if settings is not None else None,
        lr=settings.lr if settings is not None else float(number != UNTRAINED),
        weight_decay=0.0 if has_no_decay else decay,
        states=states,
        copies=shard.copies,
        experts=shard.experts,
        full_precision=full_precision,
    )


def describe_groups(
    model: Model, config: OptimizerConfig, fp32: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return a row for each parameter group; the model may be on the meta device."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    aliases = find_aliases(model)
    return [
        {
            "match": group.match,
            "names": sorted({_layer_pattern(aliases[name][-1]) for name in group.names}),
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
    """Return the local shards by parameter. Call before an engine wraps the model."""
    if model.local_shards:
        return model.local_shards
    return {name: LocalShard(tuple(p.shape)) for name, p in model.named_parameters()}


def find_aliases(model: Model) -> dict[str, tuple[str, ...]]:
    """Return, by parameter, the names that a pattern can match: the parameter's name, and names
    with an operator's name or kind in place of `mixer.operator` and `mlp.operator`."""
    config = model.config
    prefix_aliases: dict[str, list[str]] = {}
    for number, layer in enumerate(config.layers):
        operators = {"mixer.operator": layer.mixer, "mixer.second": layer.second}
        for place, operator in {**operators, "mlp.operator": layer.mlp}.items():
            if operator is not None:
                kind = config.operators[operator].kind
                prefix = f"blocks.{number}.{place}."
                prefix_aliases[prefix] = [f"blocks.{number}.{word}." for word in (operator, kind)]
        if layer.shared is not None:
            kind = config.operators[layer.shared].kind
            prefix_aliases[f"shared.{layer.shared}."] = [f"shared.{kind}."]
    names: dict[str, tuple[str, ...]] = {}
    for name, _ in model.named_parameters():
        names[name] = (name,)
        if match := re.match(
            r"blocks\.\d+\.(mixer\.operator|mixer\.second|mlp\.operator)\.|shared\.[^.]+\.", name
        ):
            suffix = name[match.end() :]
            names[name] += tuple(prefix + suffix for prefix in prefix_aliases[match[0]])
    return names


def assign_groups(
    names: Mapping[str, Sequence[str]], groups: Sequence[GroupConfig]
) -> dict[str, int]:
    """Return the number of the first matching group by parameter; len(groups) without a match."""
    numbers = {
        name: next((n for n, group in enumerate(groups) if _matches(group, aliases)), len(groups))
        for name, aliases in names.items()
    }
    unused = [number for number in range(len(groups)) if number not in numbers.values()]
    if unused:
        problems = [
            ConfigProblem(f"groups.{n}.match", _unmatched(groups[n], names)) for n in unused
        ]
        raise ConfigError("the optimizer", problems)
    return numbers


def _matches(group: GroupConfig, aliases: Sequence[str]) -> bool:
    return any(fnmatchcase(name, group.match) for name in aliases)


def _unmatched(group: GroupConfig, names: Mapping[str, Sequence[str]]) -> str:
    if any(_matches(group, aliases) for aliases in names.values()):
        return f"`{group.match}` matches only parameters of the groups before it"
    patterns = sorted({pattern for aliases in names.values() for pattern in _patterns(aliases)})
    close = difflib.get_close_matches(group.match, patterns, n=MAX_SUGGESTIONS, cutoff=0.3)
    hint = f"; the nearest are {', '.join(close)}" if close else ""
    return f"no parameter's name matches `{group.match}`{hint}"


def _patterns(aliases: Sequence[str]) -> Iterator[str]:
    """Yield patterns that would match a parameter, with `*` for layer numbers."""
    for name in aliases:
        words = _layer_pattern(name).split(".")
        for length in range(2 if words[0] == "blocks" else 1, len(words) + 1):
            tail = "" if length == len(words) else ".*"
            yield ".".join(words[:length]) + tail


def _layer_pattern(name: str) -> str:
    """Return the parameter's pattern in all layers: numbers become `*`."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
