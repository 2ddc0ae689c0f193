"""Rules that map headrace tensors (ours) to published ones (theirs) and back, without loss."""

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
    """Mapping between a tensor of ours and the published tensors with the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    export: Callable[[Tensor], Sequence[Tensor]]
    restore: Callable[[Sequence[Tensor]], Tensor]
    prefixes: tuple[str, ...] = ()
    """Modules that share these weights. Names in `theirs` begin with the first prefix; a folder may
    store a tensor under any of them."""

    def copies(self, name: str) -> list[str]:
        """Return the names under which a folder may store a tensor of `theirs`."""
        if not self.prefixes:
            return [name]
        suffix = name.removeprefix(self.prefixes[0])
        return [prefix + suffix for prefix in self.prefixes]


def map_same(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,), lambda t: [t], lambda ts: ts[0])


def map_reshaped(
    ours: str, theirs: str, export: Callable[[Tensor], Tensor], restore: Callable[[Tensor], Tensor]
) -> Rule:
    """Map a tensor to a single tensor with another shape or order."""
    return Rule(ours, (theirs,), lambda t: [export(t)], lambda ts: restore(ts[0]))


def map_transposed(ours: str, theirs: str) -> Rule:
    return map_reshaped(ours, theirs, lambda t: t.T, lambda t: t.T)


def map_taps(ours: str, theirs: str) -> Rule:
    """Map filters: our first tap is the current token; in convolution modules it is the last."""
    return map_reshaped(
        ours, theirs, lambda t: t.flip(-1).unsqueeze(1), lambda t: t.squeeze(1).flip(-1)
    )


def map_rows(ours: str, theirs: Mapping[str, int]) -> Rule:
    """Map a tensor to the concatenation of several along rows; `theirs` has their rows by name."""
    return Rule(
        ours,
        tuple(theirs),
        lambda t: t.split(list(theirs.values())),
        lambda ts: torch.cat(list(ts)),
    )


def map_interleaved(ours: str, theirs: str, num_parts: int) -> Rule:
    """Map `num_parts` concatenated parts to interleaved rows: a row of each part in turn."""
    return map_reshaped(
        ours,
        theirs,
        lambda t: t.unflatten(0, (num_parts, -1)).transpose(0, 1).flatten(0, 1),
        lambda t: t.unflatten(0, (-1, num_parts)).transpose(0, 1).flatten(0, 1),
    )


def export_tensors(rules: Iterable[Rule], tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield the published tensors one by one, so that a model need not fit in memory."""
    for rule in rules:
        for name, tensor in zip(rule.theirs, rule.export(tensors[rule.ours]), strict=True):
            yield name, tensor.contiguous()


def import_tensors(
    rules: Sequence[Rule],
    theirs: Weights,
    config: ModelConfig,
    *,
    source: str,
    ignored: Callable[[str], bool] = lambda name: False,
) -> Weights:
    """Return all tensors of ours, read lazily. Raise for missing and unknown tensors and wrong
    shapes at once, and for differing copies when a tensor is read."""
    shapes = {
        name: tuple(parameter.shape) for name, parameter in build_meta(config).named_parameters()
    }
    stored_names = {
        name: [copy for copy in rule.copies(name) if copy in theirs]
        for rule in rules
        for name in rule.theirs
    }
    missing = sorted(name for name, copies in stored_names.items() if not copies)
    known_names = {copy for copies in stored_names.values() for copy in copies}
    unknown = sorted(name for name in theirs.keys() - known_names if not ignored(name))
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is not part of this model" for name in unknown]
    for rule in rules if not problems else ():
        stand_ins = [theirs.shadow(stored_names[name][0]) for name in rule.theirs]
        try:
            shape: object = tuple(rule.restore(stand_ins).shape)
        except RuntimeError:
            shape = ", ".join(str(tuple(stand_in.shape)) for stand_in in stand_ins)
        if shape != shapes[rule.ours]:
            names = ", ".join(rule.theirs)
            problems.append(f"{names}: {rule.ours} is {shapes[rule.ours]}, found {shape}")
    if problems:
        shown = "\n  ".join(problems[:12] + (["…"] if len(problems) > 12 else []))
        raise CheckpointError(f"the tensors do not fit the model\n  {shown}", where=source)
    by_name = {rule.ours: rule for rule in rules}

    def tensor(name: str) -> Tensor:
        first, *duplicates = stored_names[name]
        tensor = theirs[first]
        for copy in duplicates:
            if not torch.equal(tensor, theirs[copy]):
                raise CheckpointError(
                    f"{first} and {copy} are one shared tensor, and differ", where=source
                )
        return tensor

    def read(name: str) -> Tensor:
        rule = by_name[name]
        return rule.restore([tensor(theirs_name) for theirs_name in rule.theirs]).contiguous()

    return Weights(shapes, read)
