"""Make all ranks agree: rank 0 decides, every rank compares, and all ranks stop together.

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
"""Maximum differences, and ranks with the same value, in an error."""
LONGEST = 160
"""Maximum characters per value in an error."""
ERROR = "error"
"""Fact on a rank that cannot read its facts."""
HINT = (
    "start all ranks with the same command, files and versions; set keys that follow from the "
    "machine (device, precision, threads) in the run's YAML"
)

T = TypeVar("T")


def broadcast_first(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value on all ranks. Collective."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def run_on_first(act: Callable[[], T], group: dist.ProcessGroup | None = None) -> T | None:
    """Call `act` on rank 0 and return its result there; None on all further ranks. If it raises,
    all ranks raise. Collective."""
    result: T | None = None
    failure: Exception | None = None
    shared: UserError | None = None
    if dist.get_rank(group) == 0:
        try:
            result = act()
        except Exception as error:
            failure = error
            shared = error if isinstance(error, UserError) else _unexpected_error(error)
    shared = broadcast_first(shared, group)
    if shared is not None:
        raise failure or shared
    return result


def _unexpected_error(error: Exception) -> RunError:
    return RunError(f"rank 0 failed: {error!r}", hint="its log has the traceback")


def read_agreed(
    subject: str,
    read: Callable[[], T],
    facts: Callable[[T], Mapping[str, Any]],
    group: dist.ProcessGroup | None = None,
    hint: str = HINT,
) -> T:
    """Return the result of `read`, if its facts are equal on all ranks. Collective.

    Otherwise all ranks raise, even if `read` fails on some ranks only. `subject` names in the error
    what the ranks read.
    """
    result: T | None = None
    failure: UserError | None = None
    try:
        result = read()
        local_facts = facts(result)
    except UserError as error:
        failure, local_facts = error, {ERROR: error.message}
    first_facts = broadcast_first(local_facts, group)
    failed = torch.tensor([ERROR in local_facts, ERROR not in local_facts])
    dist.all_reduce(failed, group=group)
    if failed.all():
        _raise_failures(subject, local_facts.get(ERROR), group, hint)
    _compare(subject, differences(first_facts, local_facts), group, hint)
    if failure is not None:
        raise failure
    return cast(T, result)


def _raise_failures(
    subject: str, error: str | None, group: dist.ProcessGroup | None, hint: str
) -> None:
    """Raise on all ranks: some can read their facts, and some cannot. Collective."""
    errors: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    ranks_by_error: dict[str | None, list[int]] = {}
    for rank, message in enumerate(errors):
        ranks_by_error.setdefault(message, []).append(rank)
    able = _format_ranks(ranks_by_error.pop(None))
    unable = _format_ranks([*chain(*ranks_by_error.values())])
    lines = [f"{_format_ranks(ranks)}: {message}" for message, ranks in ranks_by_error.items()]
    raise RunError(
        f"{able} can read {subject}, and {unable} cannot", where=_format_lines(lines), hint=hint
    )


def _compare(
    subject: str, local: list[Difference], group: dist.ProcessGroup | None, hint: str
) -> None:
    """Raise on all ranks if any rank differs from rank 0. Collective."""
    count = torch.tensor(len(local))
    dist.all_reduce(count, group=group)
    if not count:
        return
    by_rank: list[list[Difference]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(by_rank, local, group=group)
    raise RunError(
        f"the ranks do not agree on {subject}",
        where=_format_lines(describe_differences(by_rank)),
        hint=hint,
    )


def _format_lines(lines: Sequence[str]) -> str:
    shown = [*lines[:SHOWN], *[f"and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)]
    return "\n" + "\n".join(f"    {line}" for line in shown)


def describe_differences(by_rank: Sequence[Sequence[Difference]]) -> list[str]:
    """Return a line for each path that differs from rank 0, with values and their ranks."""
    first_values: dict[str, str] = {}
    ranks_by_value: dict[str, dict[str, list[int]]] = {}
    for rank, rank_differences in enumerate(by_rank):
        for path, first_value, value in rank_differences:
            first_values[path] = _format_value(first_value)
            ranks = ranks_by_value.setdefault(path, {}).setdefault(_format_value(value), [])
            ranks.append(rank)
    return [
        ", ".join(
            [
                f"{path}: rank 0 has {first_values[path]}",
                *(_format_holders(value, ranks) for value, ranks in holders.items()),
            ]
        )
        for path, holders in ranks_by_value.items()
    ]


def _format_holders(value: str, ranks: Sequence[int]) -> str:
    return f"{_format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join([*map(str, ranks[:SHOWN]), *['…'] * (len(ranks) > SHOWN)])}"


def _format_value(value: Any) -> str:
    text = "no value" if value is None else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
