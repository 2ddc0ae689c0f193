"""Rules that map our tensors to published ones (theirs) and back, without loss.

A model is converted by a list of rules, one per tensor of ours. Neither direction holds all tensors
in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...console.errors import CheckpointError
from ..accounting.count import build_meta
from ..config.config import ModelConfig
from ..weights import Weights

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """Maps a tensor of ours to one or several published tensors with the same numbers."""

    ours: str
    """Name of our tensor."""
    theirs: tuple[str, ...]
    """Names of the published tensors."""
    export: Callable[[Tensor], Sequence[Tensor]]
    """Computes the published tensors, in the order of `theirs`, from ours."""
    restore: Callable[[Sequence[Tensor]], Tensor]
    """Computes our tensor from the published ones."""
    prefixes: tuple[str, ...] = ()
    """Modules of a published model that share these weights. Names in `theirs` begin with the first
    prefix; a folder may store a tensor under any of them, or under several."""

    otherwise: Rule | None = None
    """The rule of another layout that a folder may have, without the first name of this one."""

    def possible_names(self, name: str) -> list[str]:
        """Return the names under which a folder may store the tensor `name` of `theirs`."""
        if not self.prefixes:
            return [name]
        suffix = name.removeprefix(self.prefixes[0])
        return [prefix + suffix for prefix in self.prefixes]


def map_same(ours: str, theirs: str) -> Rule:
    """Map a tensor to an equal one with another name."""
    return Rule(ours, (theirs,), lambda t: [t], lambda ts: ts[0])


def map_reshaped(
    ours: str, theirs: str, export: Callable[[Tensor], Tensor], restore: Callable[[Tensor], Tensor]
) -> Rule:
    """Map a tensor to a single tensor with another shape or order."""
    return Rule(ours, (theirs,), lambda t: [export(t)], lambda ts: restore(ts[0]))


def map_transposed(ours: str, theirs: str) -> Rule:
    return map_reshaped(ours, theirs, lambda t: t.T, lambda t: t.T)


def map_taps(ours: str, theirs: str) -> Rule:
    """Map our filters [channels, taps], whose first tap is the current token, to a causal Conv1d's
    weight [channels, 1, taps], whose last tap is."""
    return map_reshaped(
        ours, theirs, lambda t: t.flip(-1).unsqueeze(1), lambda t: t.squeeze(1).flip(-1)
    )


def map_rows(ours: str, theirs: Mapping[str, int]) -> Rule:
    """Map a tensor to several, which it concatenates along dimension 0. `theirs`: their numbers of
    rows, by name."""
    return Rule(
        ours,
        tuple(theirs),
        lambda t: t.split(list(theirs.values())),
        lambda ts: torch.cat(list(ts)),
    )


def map_stacked(ours: str, theirs: Iterable[str]) -> Rule:
    """Map a tensor to its slices along dimension 0."""
    return Rule(ours, tuple(theirs), lambda t: t.unbind(0), lambda ts: torch.stack(list(ts)))


def map_ends(config: ModelConfig, embedding: str, norm: str) -> list[Rule]:
    """Map the embedding, the final norm, and the head unless it is tied."""
    result = [map_same("embedding.weight", embedding), map_same("norm.weight", norm)]
    return result if config.tie_embeddings else [*result, map_same("head.weight", "lm_head.weight")]


def map_interleaved(ours: str, theirs: str, num_parts: int) -> Rule:
    """Map `num_parts` parts, concatenated along dimension 0, to their interleaved rows: a row of
    each part in turn."""
    return map_reshaped(
        ours,
        theirs,
        lambda t: t.unflatten(0, (num_parts, -1)).transpose(0, 1).flatten(0, 1),
        lambda t: t.unflatten(0, (-1, num_parts)).transpose(0, 1).flatten(0, 1),
    )


def export_tensors(rules: Iterable[Rule], tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield the published tensors, one by one, with their names."""
    for rule in rules:
        for name, tensor in zip(rule.theirs, rule.export(tensors[rule.ours]), strict=True):
            yield name, tensor.contiguous()


def import_tensors(
    rules: Sequence[Rule],
    theirs: Weights,
    config: ModelConfig,
    *,
    source: str,
    is_ignored: Callable[[str], bool] = lambda name: False,
) -> Weights:
    """Return all tensors of ours, each computed from `theirs` when it is read.

    `source`: where `theirs` come from, for errors. `is_ignored`: whether a published tensor that no
    rule maps is left out.

    Raise CheckpointError for missing or unknown tensors and wrong shapes; and when a tensor is
    read, if its copies under several prefixes differ.
    """
    rules = [choose_layout(rule, theirs) for rule in rules]
    shapes = {
        name: tuple(parameter.shape) for name, parameter in build_meta(config).named_parameters()
    }
    stored_names = {
        name: [stored for stored in rule.possible_names(name) if stored in theirs]
        for rule in rules
        for name in rule.theirs
    }
    problems = _name_problems(theirs, stored_names, is_ignored)
    problems = problems or _shape_problems(rules, theirs, stored_names, shapes)
    if problems:
        shown = "\n  ".join(problems[:12] + (["…"] if len(problems) > 12 else []))
        raise CheckpointError(f"the tensors do not fit the model\n  {shown}", where=source)
    rules_by_name = {rule.ours: rule for rule in rules}

    def read_theirs(name: str) -> Tensor:
        first, *duplicates = stored_names[name]
        tensor = theirs[first]
        for duplicate in duplicates:
            if not torch.equal(tensor, theirs[duplicate]):
                raise CheckpointError(
                    f"{first} and {duplicate} are one shared tensor, and differ", where=source
                )
        return tensor

    def read_ours(name: str) -> Tensor:
        rule = rules_by_name[name]
        return rule.restore([read_theirs(their_name) for their_name in rule.theirs]).contiguous()

    return Weights(shapes, read_ours)


def choose_layout(rule: Rule, theirs: Weights) -> Rule:
    """Return the rule of the layout in which a folder stores a tensor."""
    if rule.otherwise is None or rule.theirs[0] in theirs:
        return rule
    return rule.otherwise if rule.otherwise.theirs[0] in theirs else rule


def _name_problems(
    theirs: Weights, stored_names: Mapping[str, Sequence[str]], is_ignored: Callable[[str], bool]
) -> list[str]:
    """List missing and unknown tensors. `stored_names`: for each name in a rule, those in
    `theirs`."""
    missing = sorted(name for name, stored in stored_names.items() if not stored)
    mapped = {name for stored in stored_names.values() for name in stored}
    unknown = sorted(name for name in theirs.keys() - mapped if not is_ignored(name))
    problems = [f"{name} is missing" for name in missing]
    return problems + [f"{name} is not part of this model" for name in unknown]


def _shape_problems(
    rules: Sequence[Rule],
    theirs: Weights,
    stored_names: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """List the tensors of ours whose shape is not in `shapes`, without reading `theirs`."""
    problems = []
    for rule in rules:
        stand_ins = [theirs.meta_tensor(stored_names[name][0]) for name in rule.theirs]
        try:
            shape: object = tuple(rule.restore(stand_ins).shape)
        except RuntimeError:
            shape = ", ".join(str(tuple(stand_in.shape)) for stand_in in stand_ins)
        if shape != shapes[rule.ours]:
            names = ", ".join(rule.theirs)
            problems.append(f"{names}: {rule.ours} is {shapes[rule.ours]}, found {shape}")
    return problems
