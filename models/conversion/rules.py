"""Rules that map our tensors to published ones and back, without loss."""

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
    """One of our tensors and the published tensors that hold the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    there: Callable[[Tensor], Sequence[Tensor]]
    back: Callable[[Sequence[Tensor]], Tensor]
    prefixes: tuple[str, ...] = ()
    """Modules that share the published tensors, for weights that several layers share. `theirs`
    begin with the first; a folder may hold each tensor under any of them."""

    def copies(self, name: str) -> list[str]:
        """Return the names under which a folder may hold this tensor of `theirs`."""
        if not self.prefixes:
            return [name]
        rest = name.removeprefix(self.prefixes[0])
        return [prefix + rest for prefix in self.prefixes]


def same(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,), lambda t: [t], lambda ts: ts[0])


def shaped(
    ours: str, theirs: str, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Rule:
    """Map one tensor to one, in another shape or order."""
    return Rule(ours, (theirs,), lambda t: [there(t)], lambda ts: back(ts[0]))


def transposed(ours: str, theirs: str) -> Rule:
    return shaped(ours, theirs, lambda t: t.T, lambda t: t.T)


def taps(ours: str, theirs: str) -> Rule:
    """Map filters: ours begin with the current token, convolution modules end with it."""
    return shaped(ours, theirs, lambda t: t.flip(-1).unsqueeze(1), lambda t: t.squeeze(1).flip(-1))


def rows(ours: str, theirs: Mapping[str, int]) -> Rule:
    """Map our tensor to theirs, concatenated by rows; `theirs` gives the rows of each."""
    return Rule(
        ours,
        tuple(theirs),
        lambda t: t.split(list(theirs.values())),
        lambda ts: torch.cat(list(ts)),
    )


def interleaved(ours: str, theirs: str, parts: int) -> Rule:
    """Map our parts, concatenated by rows, to one row of each part in turn."""
    return shaped(
        ours,
        theirs,
        lambda t: t.unflatten(0, (parts, -1)).transpose(0, 1).flatten(0, 1),
        lambda t: t.unflatten(0, (-1, parts)).transpose(0, 1).flatten(0, 1),
    )


def to_theirs(rules: Iterable[Rule], tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield the published tensors one at a time, so that a model need not fit in memory."""
    for rule in rules:
        for name, tensor in zip(rule.theirs, rule.there(tensors[rule.ours]), strict=True):
            yield name, tensor.contiguous()


def to_ours(
    rules: Sequence[Rule],
    theirs: Weights,
    config: ModelConfig,
    *,
    source: str,
    ignored: Callable[[str], bool] = lambda name: False,
) -> Weights:
    """Return all our tensors. Raise if one is missing, unknown, or of another shape, or, when it
    is read, if its copies differ."""
    shapes = {name: tuple(p.shape) for name, p in build_meta(config).named_parameters()}
    held = {
        name: [copy for copy in rule.copies(name) if copy in theirs]
        for rule in rules
        for name in rule.theirs
    }
    missing = sorted(name for name, copies in held.items() if not copies)
    known = {copy for copies in held.values() for copy in copies}
    unknown = sorted(name for name in theirs.keys() - known if not ignored(name))
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is not part of this model" for name in unknown]
    for rule in rules if not problems else ():
        shadows = [theirs.shadow(held[name][0]) for name in rule.theirs]
        try:
            shape: object = tuple(rule.back(shadows).shape)
        except RuntimeError:
            shape = ", ".join(str(tuple(shadow.shape)) for shadow in shadows)
        if shape != shapes[rule.ours]:
            names = ", ".join(rule.theirs)
            problems.append(f"{names}: {rule.ours} is {shapes[rule.ours]}, found {shape}")
    if problems:
        shown = "\n  ".join(problems[:12] + (["…"] if len(problems) > 12 else []))
        raise CheckpointError(f"the tensors do not fit the model\n  {shown}", where=source)
    by_name = {rule.ours: rule for rule in rules}

    def tensor(name: str) -> Tensor:
        first, *others = held[name]
        tensor = theirs[first]
        for other in others:
            if not torch.equal(tensor, theirs[other]):
                raise CheckpointError(
                    f"{first} and {other} are one shared tensor, and differ", where=source
                )
        return tensor

    def read(name: str) -> Tensor:
        rule = by_name[name]
        return rule.back([tensor(other) for other in rule.theirs]).contiguous()

    return Weights(shapes, read)
