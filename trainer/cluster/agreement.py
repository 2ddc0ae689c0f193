"""Agreement of all ranks: rank 0 decides, every rank compares, and all ranks stop together.

rank 0 ── its facts ──► every rank compares ── number of differences ──► all go on, or all raise
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ...console.differences import Difference, differences
from ...console.errors import RunError, UserError

SHOWN = 8
"""Most differences, and ranks with one value, that an error lists."""
LONGEST = 160
"""Most characters of a value that an error shows."""
ERROR = "error"
"""Fact of a rank that cannot read its facts."""
HINT = (
    "start all ranks with the same command, files and versions; set keys that follow from the "
    "machine (device, precision, threads) in the run's YAML"
)

T = TypeVar("T")


def from_first(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value on all ranks. Collective."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def by_first(act: Callable[[], T], group: dist.ProcessGroup | None = None) -> T | None:
    """Return what `act` returns on rank 0, and None on the others. If it raises, all ranks raise.
    Collective."""
    result: T | None = None
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            result = act()
        except Exception as error:
            failure = error
    known = failure if failure is None or isinstance(failure, UserError) else _unknown(failure)
    known = from_first(known, group)
    if known is not None:
        raise failure or known
    return result


def _unknown(error: Exception) -> RunError:
    return RunError(f"rank 0 failed: {error!r}", hint="its log has the traceback")


def agreed(
    subject: str,
    read: Callable[[], T],
    facts: Callable[[T], Mapping[str, Any]],
    group: dist.ProcessGroup | None = None,
    hint: str = HINT,
) -> T:
    """Return what `read` returns, if its facts are equal on all ranks. Collective.

    Otherwise all ranks raise, also if `read` fails on some of them alone. `subject` is what the
    ranks read, for the error.
    """
    result: T | None = None
    failure: UserError | None = None
    try:
        result = read()
        mine = facts(result)
    except UserError as error:
        failure, mine = error, {ERROR: error.message}
    theirs = from_first(mine, group)
    failed = torch.tensor([ERROR in mine, ERROR not in mine])
    dist.all_reduce(failed, group=group)
    if failed.all():
        _raise_failures(subject, mine.get(ERROR), group, hint)
    _compare(subject, differences(theirs, mine), group, hint)
    if failure is not None:
        raise failure
    return cast(T, result)


def _raise_failures(
    subject: str, error: str | None, group: dist.ProcessGroup | None, hint: str
) -> None:
    """Raise on all ranks: some of them cannot read their facts, and others can. Collective."""
    errors: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    ranks_by_error: dict[str | None, list[int]] = {}
    for rank, text in enumerate(errors):
        ranks_by_error.setdefault(text, []).append(rank)
    able = _ranks(ranks_by_error.pop(None))
    lines = [f"{_ranks(ranks)}: {text}" for text, ranks in ranks_by_error.items()]
    raise RunError(
        f"{able} can read {subject}, and {_ranks([*chain(*ranks_by_error.values())])} cannot",
        where=_listed(lines),
        hint=hint,
    )


def _compare(
    subject: str, changed: list[Difference], group: dist.ProcessGroup | None, hint: str
) -> None:
    """Raise on all ranks if any rank differs from rank 0. Collective."""
    count = torch.tensor(len(changed))
    dist.all_reduce(count, group=group)
    if not count:
        return
    of_ranks: list[list[Difference]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, changed, group=group)
    raise RunError(
        f"the ranks do not agree on {subject}", where=_listed(in_words(of_ranks)), hint=hint
    )


def _listed(lines: Sequence[str]) -> str:
    shown = [*lines[:SHOWN], *[f"and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)]
    return "\n" + "\n".join(f"    {line}" for line in shown)


def in_words(of_ranks: Sequence[Sequence[Difference]]) -> list[str]:
    """Return a line for each path that differs from rank 0, with the values and their ranks."""
    first: dict[str, str] = {}
    others: dict[str, dict[str, list[int]]] = {}
    for rank, changed in enumerate(of_ranks):
        for path, there, here in changed:
            first[path] = _shown(there)
            others.setdefault(path, {}).setdefault(_shown(here), []).append(rank)
    return [
        ", ".join([f"{path}: rank 0 has {first[path]}", *map(_held, values, values.values())])
        for path, values in others.items()
    ]


def _held(value: str, ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join([*map(str, ranks[:SHOWN]), *['…'] * (len(ranks) > SHOWN)])}"


def _shown(value: Any) -> str:
    text = "no value" if value is None else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
