"""How tensors of ours become tensors of theirs, and back: each rule says both, without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...console.errors import CheckpointError

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """One tensor of ours and those of theirs that it corresponds to."""

    ours: str
    theirs: tuple[str, ...]
    there: Callable[[Tensor], Sequence[Tensor]]
    back: Callable[[Sequence[Tensor]], Tensor]


def same(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,), lambda t: [t], lambda ts: ts[0])


def shaped(
    ours: str, theirs: str, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Rule:
    """One tensor each, in another shape or order."""
    return Rule(ours, (theirs,), lambda t: [there(t)], lambda ts: back(ts[0]))


def transposed(ours: str, theirs: str) -> Rule:
    return shaped(ours, theirs, lambda t: t.T, lambda t: t.T)


def taps(ours: str, theirs: str) -> Rule:
    """Our filters begin with the present token; convolution modules end with it."""
    return shaped(ours, theirs, lambda t: t.flip(-1).unsqueeze(1), lambda t: t.squeeze(1).flip(-1))


def rows(ours: str, theirs: Mapping[str, int]) -> Rule:
    """Ours is theirs, one below the other, each with so many rows."""
    return Rule(
        ours,
        tuple(theirs),
        lambda t: t.split(list(theirs.values())),
        lambda ts: torch.cat(list(ts)),
    )


def interleaved(ours: str, theirs: str, parts: int) -> Rule:
    """Ours has the parts one below the other; theirs takes a row of each by turns."""
    return shaped(
        ours,
        theirs,
        lambda t: t.unflatten(0, (parts, -1)).transpose(0, 1).flatten(0, 1),
        lambda t: t.unflatten(0, (-1, parts)).transpose(0, 1).flatten(0, 1),
    )


def to_theirs(rules: Iterable[Rule], tensors: Mapping[str, Tensor]) -> Tensors:
    result: Tensors = {}
    for rule in rules:
        for name, tensor in zip(rule.theirs, rule.there(tensors[rule.ours]), strict=True):
            result[name] = tensor.contiguous()
    return result


def to_ours(
    rules: Sequence[Rule],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    *,
    ignored: Callable[[str], bool],
    source: str,
) -> Tensors:
    """Every tensor of ours, checked against its shape; nothing of theirs may be left over."""
    wanted = {name for rule in rules for name in rule.theirs}
    missing = sorted(wanted - tensors.keys())
    unknown = sorted(name for name in tensors.keys() - wanted if not ignored(name))
    problems = [f"there is no {name}" for name in missing]
    problems += [f"{name} is not a part of this model" for name in unknown]
    result: Tensors = {}
    for rule in rules if not problems else ():
        given = [tensors[name] for name in rule.theirs]
        try:
            result[rule.ours] = rule.back(given).contiguous()
            found: object = tuple(result[rule.ours].shape)
        except RuntimeError:
            found = ", ".join(str(tuple(tensor.shape)) for tensor in given)
        if found != tuple(shapes[rule.ours]):
            names = ", ".join(rule.theirs)
            problems.append(f"{names}: {rule.ours} is {tuple(shapes[rule.ours])}, found {found}")
    if problems:
        shown = "\n  ".join(problems[:12] + (["…"] if len(problems) > 12 else []))
        raise CheckpointError(f"the tensors do not fit the model\n  {shown}", where=source)
    return result
