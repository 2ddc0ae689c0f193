"""Names of tensors: tables from our modules to theirs, and the rules that follow from them.

An entry names what a module or parameter of ours is called there: a name; several, whose rows ours
concatenates; or a function that returns the rule. Parameters follow from the built model, so a
table says nothing about biases that are there or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config.options.base import OperatorOptions
from ..layers.linear import SplitLinear
from ..operators import OPERATORS
from .rules import (
    Rule,
    map_interleaved,
    map_reshaped,
    map_rows,
    map_same,
    map_stacked,
    map_taps,
    map_transposed,
)

RuleOf = Callable[["Target"], Rule]
Rows = Mapping[str, Tensor]
Names = Mapping[str, str | tuple[str, ...] | RuleOf]


@dataclass(frozen=True)
class Target:
    """A parameter of ours, and the published module that holds its tensors."""

    ours: str
    """The parameter's whole name."""
    theirs: str
    """The published module."""
    ending: str
    """What follows the table's entry in `ours`: `weight` or `bias`, or nothing."""
    module: nn.Module
    """The built operator."""
    options: OperatorOptions | None = None

    def parts(self, path: str) -> dict[str, int]:
        """Return the rows of a projection, by part."""
        split = self.module.get_submodule(path)
        assert isinstance(split, SplitLinear)
        return split.parts

    def name(self, name: str) -> str:
        """Return the whole name of a published tensor or module."""
        return ".".join(part for part in (self.theirs, name, self.ending) if part)


def build_rule(
    names: Names,
    path: str,
    ours: str,
    theirs: str,
    module: nn.Module,
    options: OperatorOptions | None = None,
) -> Rule:
    """Return the rule for a parameter. `path` is its name within `module`, which is called `ours`
    here and `theirs` there."""
    entry, ending = find_entry(names, path)
    target = Target(f"{ours}.{path}" if ours else path, theirs, ending, module, options)
    name = names[entry]
    if isinstance(name, str):
        return map_same(target.ours, target.name(name))
    if isinstance(name, tuple):
        rows = zip(map(target.name, name), target.parts(entry).values(), strict=True)
        return map_rows(target.ours, dict(rows))
    return name(target)


def operator_rules(
    names: Names, ours: str, theirs: str, options: OperatorOptions, width: int
) -> list[Rule]:
    """Return the rules for an operator's parameters."""
    with torch.device("meta"):
        module = OPERATORS[options.kind](options, width)
    paths = [path for path, _ in module.named_parameters()]
    return [build_rule(names, path, ours, theirs, module, options) for path in paths]


def find_entry(names: Names, path: str) -> tuple[str, str]:
    """Return the table's entry for a parameter, and what follows it in the parameter's name."""
    entry, ending = path, ""
    while entry not in names:
        entry, _, last = entry.rpartition(".")
        assert last, f"the table of names has no entry for {path}"
        ending = f"{last}.{ending}" if ending else last
    return entry, ending


def either(*names: str) -> RuleOf:
    """Return the rule of a tensor that folders store under one of several names; the first is
    written."""

    def rule(target: Target) -> Rule:
        prefixes = tuple(map(target.name, names))
        return replace(map_same(target.ours, prefixes[0]), prefixes=prefixes)

    return rule


def transposed(name: str) -> RuleOf:
    """Return the rule of a projection whose matrix is stored transposed."""

    def rule(target: Target) -> Rule:
        map_tensor = map_transposed if target.ending == "weight" else map_same
        return map_tensor(target.ours, target.name(name))

    return rule


def taps(name: str) -> RuleOf:
    """Return the rule of a filter that is a causal Conv1d's weight there."""
    return lambda target: map_taps(target.ours, target.name(name))


def split_taps(*names: str, of: str) -> RuleOf:
    """Return the rule of a filter whose channels are several Conv1d's there, one for each of the
    first parts of the projection `of`."""

    def rule(target: Target) -> Rule:
        rows = list(target.parts(of).values())[: len(names)]
        return Rule(
            target.ours,
            tuple(map(target.name, names)),
            lambda t: [part.flip(-1).unsqueeze(1) for part in t.split(rows)],
            lambda ts: torch.cat(list(ts)).squeeze(1).flip(-1),
        )

    return rule


def reordered(*names: str, of: str, order: Callable[[Rows, Any], list[Tensor]]) -> RuleOf:
    """Return the rule of a projection `of` whose rows have another order there, and stand in
    several tensors. `order` receives the numbers of our rows by part, and the options, and returns
    those numbers in the order of each tensor."""

    def rule(target: Target) -> Rule:
        sizes = target.parts(of)
        rows = torch.arange(sum(sizes.values())).split(list(sizes.values()))
        orders = order(dict(zip(sizes, rows, strict=True)), target.options)
        places = torch.argsort(torch.cat(orders))

        def restore(ts: Sequence[Tensor]) -> Tensor:
            joined = torch.cat(list(ts))
            if len(joined) != len(places):
                raise RuntimeError("another number of rows")
            return joined[places.to(joined.device)]

        return Rule(
            target.ours,
            tuple(map(target.name, names)),
            lambda t: [t[rows.to(t.device)] for rows in orders],
            restore,
        )

    return rule


def gated_experts(gate: str, up: str) -> RuleOf:
    """Return the rule of [experts, 2·hidden, width], whose matrices are stored one by one, those of
    gates and ups by themselves. The names have a `*` for the expert's number."""

    def rule(target: Target) -> Rule:
        count = getattr(target.options, "experts", 0)
        names = (name.replace("*", str(i)) for i in range(count) for name in (gate, up))
        return Rule(target.ours, tuple(map(target.name, names)), split_experts, join_experts)

    return rule


def split_experts(gate_up: Tensor) -> list[Tensor]:
    """Split [experts, 2·hidden, width] into each expert's gate and up matrices."""
    return [matrix for expert in gate_up.unbind(0) for matrix in expert.chunk(2)]


def join_experts(matrices: Sequence[Tensor]) -> Tensor:
    pairs = zip(matrices[::2], matrices[1::2], strict=True)
    return torch.stack([torch.cat(pair) for pair in pairs])


def one_head(name: str) -> RuleOf:
    """Return the rule of a tensor with a leading dimension of heads, which has one head there."""
    return lambda target: map_reshaped(
        target.ours, target.name(name), lambda t: t.squeeze(0), lambda t: t.unsqueeze(0)
    )


def interleaved(name: str, num_parts: int) -> RuleOf:
    """Return the rule of parts whose rows alternate there."""
    return lambda target: map_interleaved(target.ours, target.name(name), num_parts)


def swapped_rows(name: str) -> RuleOf:
    """Return the rule of three projections [1, 2, 3] that are stored as [2, 1, 3]."""

    def swap(t: Tensor) -> Tensor:
        first, second, third = t.chunk(3)
        return torch.cat([second, first, third])

    return lambda target: map_reshaped(target.ours, target.name(name), swap, swap)


def experts(name: str) -> RuleOf:
    """Return the rule of a tensor whose experts are stored one by one. `name` has a `*` for their
    number."""

    def rule(target: Target) -> Rule:
        slices = range(getattr(target.options, "experts", 0))
        return map_stacked(target.ours, [target.name(name.replace("*", str(i))) for i in slices])

    return rule


def or_stacked(rule_of: RuleOf, name: str) -> RuleOf:
    """Return a rule whose tensor may also stand in one piece, like ours."""
    return lambda target: replace(
        rule_of(target), otherwise=map_same(target.ours, target.name(name))
    )
