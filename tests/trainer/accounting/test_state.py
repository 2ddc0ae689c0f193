"""The state that engines list, beside the tensors that they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.ranks.fixtures import TASKS
from support.ranks.ranks import Ranks

from headrace.models.accounting.state import StatePart, state_bytes

Measured = dict[str, Any]
"""Answer of a rank: its tensor rank, the bytes that it holds, and its engine's parts."""
SMALL_TENSORS = 8192
"""Bytes: AdamW's step counters, padding of flat groups, and hidden states of 24 tokens that FSDP2
keeps until the last micro-batch. A byte per parameter is 30,385 on each of two ranks."""
SINGLE = [
    "deepspeed-0-fp32",
    "deepspeed-1-fp32",
    "deepspeed-2-fp32",
    "deepspeed-3-fp32",
    "deepspeed-1-bf16",
    "deepspeed-2-bf16",
    "deepspeed-3-bf16",
    "fsdp2-0-fp32",
    "fsdp2-0-bf16",
    "deepspeed-1-bf16-offload",
    "deepspeed-1-fp32-offload",
    "deepspeed-2-fp32-offload",
    "fsdp2-0-bf16-ahead",
    "fsdp2-0-bf16-kept",
]
DOUBLE = [
    *SINGLE,
    "fsdp2-1-fp32",  # HSDP: two replicas
    "fsdp2-0-fp32-own",
    "deepspeed-1-fp32-tp2",
    "deepspeed-3-bf16-cp2",
    "fsdp2-0-fp32-cp2",
    "fsdp2-0-bf16-tp2",
    "deepspeed-1-fp32-ep2",
    "deepspeed-2-bf16-ep2",
    "deepspeed-2-bf16-offload-ep2",
    "fsdp2-0-fp32-ep2",
    "fsdp2-1-bf16-tp2ep2",
    "deepspeed-1-fp32-overlap",
    "deepspeed-2-bf16-offload",
    "deepspeed-3-bf16-offload",
    "deepspeed-3-bf16-hpz",
    "fsdp2-0-bf16-away",
]
CONTROLLED = ["deepspeed-1-fp32", "deepspeed-3-bf16", "fsdp2-0-fp32"]
"""Layouts of two ranks that `make test` measures, with a negative control; the others are long."""


@pytest.fixture(scope="module")
def measure() -> Iterator[Callable[[int, str], list[Measured]]]:
    with ExitStack() as stack:

        @cache
        def pool(size: int) -> Ranks:
            result = Ranks(size, TASKS / "held.py")
            stack.callback(result.stop)
            return result

        @cache
        def run(ranks: int, layout: str) -> list[Measured]:
            # The other model has experts, and a large part outside of its layers.
            uses_shared = layout.startswith("fsdp2") or "ep" in layout.split("-")[-1]
            return pool(ranks).run("measure", layout, "shared" if uses_shared else "tiny")

        yield run


def differences(layout: str, measured: list[Measured], parts: list[StatePart]) -> dict[str, int]:
    """Return live bytes less listed bytes, where a part differs on the rank that holds the most of
    its tensor rank."""
    wrong = {}
    for tensor_rank in {rank["tensor_rank"] for rank in measured}:
        ranks = [rank for rank in measured if rank["tensor_rank"] == tensor_rank]
        listed = state_bytes(masters_apart(parts), ranks[0]["shards"], ranks[0]["degrees"])
        for part in ranks[0]["held"]:
            difference = max(rank["held"][part] for rank in ranks) - listed.get(part, 0)
            lower_bound = -SMALL_TENSORS - less_ahead(layout, part, ranks[0])
            if not lower_bound <= difference <= SMALL_TENSORS + edge(layout, part, ranks[0]):
                wrong[f"{part} of tensor rank {tensor_rank}"] = difference
    return wrong


def masters_apart(parts: list[StatePart]) -> list[StatePart]:
    """Count the first weights as masters for an engine that lists no masters: they are the same."""
    if any(part.name == "masters" for part in parts):
        return parts
    weights = next(number for number, part in enumerate(parts) if part.name == "weights")
    return [*parts[:weights], replace(parts[weights], name="masters"), *parts[weights + 1 :]]


def less_ahead(layout: str, part: str, rank: Measured) -> int:
    """FSDP2 gathers split experts apart from their block, so less than a block is ahead of it."""
    if layout.startswith("fsdp2") and part == "weights":
        return sum(4 * math.prod(shard.local) for shard in rank["shards"].values() if shard.experts)
    return 0


def edge(layout: str, part: str, rank: Measured) -> int:
    """ZeRO-2 in fp32 keeps the whole gradient of the parameter on the edge of its shard."""
    if layout.startswith("deepspeed-2-fp32") and part == "gradients":
        return 4 * max(math.prod(shard.local) for shard in rank["shards"].values())
    return 0


@pytest.mark.parametrize("layout", SINGLE)
def test_listed_state_is_what_one_rank_holds(
    measure: Callable[[int, str], list[Measured]], layout: str
) -> None:
    measured = measure(1, layout)
    assert not differences(layout, measured, measured[0]["parts"])


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in CONTROLLED else pytest.mark.long) for name in DOUBLE],
)
def test_listed_state_is_what_each_of_two_ranks_holds(
    measure: Callable[[int, str], list[Measured]], layout: str
) -> None:
    measured = measure(2, layout)
    assert not differences(layout, measured, measured[0]["parts"])


@pytest.mark.parametrize("layout", CONTROLLED)
def test_every_wrong_entry_is_found(
    measure: Callable[[int, str], list[Measured]], layout: str
) -> None:
    """Negative control: a byte more, a part left out, a part not sharded."""
    measured = measure(2, layout)
    parts = measured[0]["parts"]
    for number, part in enumerate(parts):
        assert isinstance(part.bytes_per_parameter, int)
        size = part.bytes(measured[0]["shards"], measured[0]["degrees"])
        if size // part.bytes_per_parameter < SMALL_TENSORS:  # fp32 parameters beside bf16
            continue
        wrong = [[replace(part, bytes_per_parameter=part.bytes_per_parameter + 1)], []]
        if part.sharded_over and part.name != "weights":
            wrong.append([replace(part, sharded_over=())])
        for instead in wrong:
            changed = [*parts[:number], *instead, *parts[number + 1 :]]
            assert differences(layout, measured, changed), (part, instead)
