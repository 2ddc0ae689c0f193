"""Names of tensors: tables from our modules to theirs, and the rules that follow from them.

An entry names what a module or parameter of ours is called there: a name; several, whose rows ours
concatenates; or a function that returns the rule. Parameters follow from the built model, so a
table says nothing about biases that are there or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    options: OperatorOptions | None = None
    """Options of its operator."""

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
    target = Target(f"{ours}.{path}" if ours else path, theirs, ending, options)
    name = names[entry]
    if isinstance(name, str):
        return map_same(target.ours, target.name(name))
    if isinstance(name, tuple):
        split = module.get_submodule(entry)
        assert isinstance(split, SplitLinear)
        rows = zip((target.name(part) for part in name), split.parts.values(), strict=True)
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


def transposed(name: str) -> RuleOf:
    """Return the rule of a projection whose matrix is stored transposed."""

    def rule(target: Target) -> Rule:
        map_tensor = map_transposed if target.ending == "weight" else map_same
        return map_tensor(target.ours, target.name(name))

    return rule


def taps(name: str) -> RuleOf:
    """Return the rule of a filter that is a causal Conv1d's weight there."""
    return lambda target: map_taps(target.ours, target.name(name))


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


def stacked(name: str, count: Callable[[OperatorOptions], int]) -> RuleOf:
    """Return the rule of a tensor whose slices along dimension 0 are stored one by one. `name` has
    a `*` for their number."""

    def rule(target: Target) -> Rule:
        assert target.options is not None
        slices = range(count(target.options))
        return map_stacked(target.ours, [target.name(name.replace("*", str(i))) for i in slices])

    return rule
