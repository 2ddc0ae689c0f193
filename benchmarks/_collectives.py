"""Count the collectives of torch.distributed: calls, and bytes that this rank sends.

    with Count() as count: …        counts what this thread calls, backward passes on CPU included

Every collective passes the dispatcher as an operation of c10d. Bytes are those of ring algorithms:
a rank of n sends (n − 1)/n of the whole tensor in an all-gather, a reduce-scatter, a reduce or a
broadcast, and twice that in an all-reduce; in an all-to-all, the rows of other ranks; in a send,
the message.

    python _collectives.py count FILE MODULE FUNCTION WORDS…    a console script's collectives
    python _collectives.py time FILE MODULE FUNCTION WORDS…     its CPU seconds, without counting

writes them as JSON. It needs torch alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "allreduce_": ("all-reduce", 2),
    "_allgather_base_": ("all-gather", 1),
    "allgather_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_": ("reduce", 1),
    "broadcast_": ("broadcast", 1),
}
"""Kind of each operation, and how often the whole tensor passes a rank."""
FUNCTIONAL = {
    "all_reduce": ("all-reduce", 2),
    "all_gather_into_tensor": ("all-gather", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
}
"""The same for functional operations, whose last argument is the name of the group."""
ALL_TO_ALL, FUNCTIONAL_ALL_TO_ALL, SEND = "alltoall_base_", "all_to_all_single", "send"
OTHER_ENDS = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor")
"""Operations that send no tensor."""


class Count(TorchDispatchMode):
    """Calls and sent bytes, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.add(func.name().partition("::")[2].partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def add(self, name: str, args: Any) -> None:
        if name in OTHER_ENDS:
            return
        if name == SEND:
            kind, size = "send", _size(args[0])
        elif name == ALL_TO_ALL:
            _, sent, group, _, to = args[:5]
            kind, size = "all-to-all", _to_others(sent, dist.ProcessGroup.unbox(group), to)
        elif name == FUNCTIONAL_ALL_TO_ALL:
            kind, size = "all-to-all", _to_others(args[0], _named(args[3]), args[2])
        elif name in FUNCTIONAL:
            kind, passes = FUNCTIONAL[name]
            ranks = _named(args[-1]).size()
            whole = _size(args[0]) * (ranks if kind == "all-gather" else 1)
            size = passes * (ranks - 1) * whole // ranks
        else:
            kind, passes = KINDS[name]  # an operation that is not listed is an error
            ranks = _group(args).size()
            size = passes * (ranks - 1) * max(map(_size, args)) // ranks
        self.calls[kind] += 1
        self.bytes[kind] += size


def _group(args: Any) -> dist.ProcessGroup:
    """Return the process group: the first object among the arguments of every operation."""
    first = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
    group: dist.ProcessGroup = dist.ProcessGroup.unbox(first)
    return group


def _named(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return group


def _to_others(sent: torch.Tensor, group: Any, to: list[int]) -> int:
    """Return the bytes of an all-to-all; `to` has the rows for each rank, [] if all are equal."""
    rows = to or [len(sent) // group.size()] * group.size()
    row = math.prod(sent.shape[1:]) * sent.element_size()
    return (sum(rows) - rows[group.rank()]) * row


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


def _serve(measurement: str, file: str, module: str, function: str, words: list[str]) -> int:
    sys.argv = [function, *words]
    act = getattr(importlib.import_module(module), function)
    count = Count()
    with count if measurement == "count" else contextlib.nullcontext():
        try:
            code = act() or 0
        except SystemExit as end:
            code = int(end.code or 0)
    result = {"calls": count.calls, "bytes": count.bytes, "cpu": time.process_time()}
    Path(file).write_text(json.dumps(result))
    return code


if __name__ == "__main__":
    sys.exit(_serve(*sys.argv[1:5], sys.argv[5:]))
