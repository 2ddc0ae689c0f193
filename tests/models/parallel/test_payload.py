"""Payloads of context parallelism are as in docs/models.md, counted in place of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.models.parallel import exchange, tensor
from headrace.models.parallel.axes import Axes, Axis
from headrace.models.parallel.ring import circulation

WIDTH = 16


class Network:
    """Counts what is sent to other ranks, and delivers zeros."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.sent = 0

    def exchange(self, x: Tensor, due: list[int], to: list[int], axis: Axis) -> Tensor:
        self.sent += sum(to) - to[self.axis.rank]
        return x.new_zeros(sum(due))

    def gather(self, x: Tensor, axis: Axis) -> Tensor:
        self.sent += (axis.size - 1) * x.numel()
        return x.new_zeros(axis.size, *x.shape)


@contextmanager
def network_of(axis: Axis) -> Iterator[Network]:
    network = Network(axis)
    with (
        mock.patch.object(exchange, "all_to_all", network.exchange),
        mock.patch.object(circulation, "start_all_to_all", network.exchange),
        mock.patch.object(circulation, "wait", lambda received: received),
        mock.patch.object(tensor, "all_gather", network.gather),
    ):
        yield network


def forward_numbers(model: Model, axis: Axis, part: int, **forms: Any) -> int:
    """Numbers that one rank sends for one row."""
    model.shard(Axes(context=axis, **forms))
    with network_of(axis) as network:
        model.hidden(torch.zeros(1, part, dtype=torch.int64))
    return int(network.sent)


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation creates."""

    numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return result


def largest(model: Model, size: int, part: int, **forms: Any) -> int:
    """Size of the largest tensor in forward and backward of a packed part of a row."""
    axis = Axis(None, size - 1, size)
    model.shard(Axes(context=axis, **forms))
    length = part * size
    documents = Documents.build(torch.tensor([0, 9, length // 3, length]), (1, length))
    with network_of(axis), Largest() as mode:
        hidden, _ = model.hidden(torch.zeros(1, part, dtype=torch.int64), documents.shard(axis))
        hidden.sum().backward()
    return mode.numbers


@pytest.fixture
def block_of(tiny_of: Callable[..., Model]) -> Callable[..., Model]:
    def make_block(**options: Any) -> Model:
        return tiny_of("[x]", {"x": options})

    return make_block


@pytest.mark.parametrize("part", [64, 128])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_attention(block_of: Callable[..., Model], part: int, rank: int) -> None:
    model, axis = block_of(kind="attention", heads=4, kv_heads=4), Axis(None, rank, 4)
    dim = WIDTH // 4
    by_heads = forward_numbers(model, axis, part, attention="a2a")
    assert by_heads == 3 / 4 * 2 * (4 + 4) * dim * part
    by_ring = forward_numbers(model, axis, part, attention="ring")
    round_trip = 3 * 2 * 4 * dim * part
    assert round_trip <= by_ring <= round_trip + 2 * (4 + 4) * dim * part


@pytest.mark.parametrize("rank", [0, 3])
def test_latents_go_to_all_ranks_if_they_are_less(
    block_of: Callable[..., Model], rank: int
) -> None:
    axis, part, heads = Axis(None, rank, 4), 64, 4
    sizes = {"qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 6}
    narrow = block_of(kind="mla", heads=heads, kv_lora_rank=8, **sizes)
    queries_and_output = 3 / 4 * heads * (5 + 4 + 6) * part
    assert forward_numbers(narrow, axis, part) == queries_and_output + 3 * (8 + 4) * part
    wide = block_of(kind="mla", heads=heads, kv_lora_rank=16, **sizes)
    assert forward_numbers(wide, axis, part) == 3 / 4 * 4 * heads * (5 + 4) * part
    hops, chunks = 3 * (16 + 4) * part, (heads * (9 + 6) + 16 + 4) * part
    assert hops < forward_numbers(wide, axis, part, attention="ring") <= hops + chunks


@pytest.mark.parametrize("part", [64, 128])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_halos_and_states_do_not_grow_with_the_row(
    block_of: Callable[..., Model], part: int, rank: int
) -> None:
    axis, later = Axis(None, rank, 4), 3 - rank
    featurizer = 2 * 3 * WIDTH * (later > 0)
    se = block_of(kind="hyena-se", groups=4, taps=7)
    assert forward_numbers(se, axis, part) == featurizer + 6 * WIDTH * (later > 0)
    li = block_of(kind="hyena-li", state_size=4)
    assert forward_numbers(li, axis, part) == featurizer + 2 * 4 * WIDTH * later
    heads = block_of(kind="hyena-li", state_size=4, groups=8, slow_heads=True)  # of two channels
    assert forward_numbers(heads, axis, part) == featurizer + 2 * 2 * 4 * WIDTH * later
    mamba = block_of(kind="mamba2", state_size=8, head_dim=8)
    inner = 2 * WIDTH
    conv = 3 * (inner + 2 * 8) * (later > 0)
    assert forward_numbers(mamba, axis, part) == conv + (8 * 8 + 1) * 4 * later
    delta = block_of(kind="delta", heads=2, value_heads=4, key_head_dim=6, value_head_dim=8)
    conv = 3 * (2 * 2 * 6 + 4 * 8) * (later > 0)
    assert forward_numbers(delta, axis, part) == conv + 6 * (6 + 8) * 4 * later


@pytest.mark.parametrize("part", [64, 128])
def test_long_filters_by_channels(block_of: Callable[..., Model], part: int) -> None:
    axis = Axis(None, 1, 4)
    featurizer = 2 * 3 * WIDTH
    exchanged = 3 / 4 * 2 * WIDTH * part
    freeform = block_of(kind="hyena-li-freeform", filter_horizon=40)
    assert forward_numbers(freeform, axis, part) == featurizer + exchanged
    heads = block_of(kind="hyena-li-freeform", filter_horizon=40, groups=4, slow_heads=True)
    assert forward_numbers(heads, axis, part) == featurizer + 4 * exchanged
    modal = block_of(kind="hyena-li", state_size=4)
    assert forward_numbers(modal, axis, part, hyena_li="a2a") == featurizer + exchanged
    delta = block_of(kind="delta", heads=4, key_head_dim=6, value_head_dim=8)
    channels = 2 * 6 + 2 * 8 + 2  # q, k, v, a decay and β; the output
    halo = 3 * 4 * (2 * 6 + 8)
    assert forward_numbers(delta, axis, part, delta="a2a") == halo + 3 / 4 * 4 * channels * part


@pytest.mark.parametrize("attention", ["ring", "a2a"])
def test_nothing_grows_with_the_square_of_the_row(
    tiny_of: Callable[..., Model], attention: str
) -> None:
    """Memory at most doubles with twice the part, and halves with twice the ranks for the same
    row, while a part is larger than a tile."""
    model = tiny_of("[mha, gqa, mamba2, gdn, kda, mr-toeplitz, li, freeform, se]")
    forms = {"attention": attention}
    before, after = largest(model, 2, 1024, **forms), largest(model, 2, 2048, **forms)
    assert after <= 2.05 * before
    shared = largest(model, 4, 512, **forms)
    assert shared <= 0.6 * before


class Count(TorchDispatchMode):
    """Number of operations, and of elements of all their results that are not views."""

    operations = elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        self.operations += 1
        output = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not function.is_view:
            self.elements += sum(item.numel() for item in output)
        return result


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "attention", "heads": 8, "kv_heads": 8},
        {"kind": "attention", "heads": 8, "kv_heads": 2},
        {"kind": "hyena-se", "groups": 4, "taps": 7},
        {"kind": "hyena-li-freeform", "filter_horizon": 8},
    ],
    ids=["attention", "shared heads", "halo", "channels"],
)
def test_work_does_not_grow_with_the_number_of_ranks(
    block_of: Callable[..., Model], options: dict[str, Any]
) -> None:
    """Parts are as long for 4 ranks as for 8."""
    model, result = block_of(**options), []
    for size in (4, 8):
        axis = Axis(None, 1, size)
        model.shard(Axes(context=axis))
        with network_of(axis), Count() as count:
            hidden, _ = model.hidden(torch.zeros(1, 64, dtype=torch.int64))
            hidden.sum().backward()
        result.append(count)
    few, many = result
    assert many.operations <= few.operations + 4
    # Filters and masks of whole rows grow; without them, nothing does.
    if options["kind"] == "hyena-se":
        assert many.elements <= 1.05 * few.elements
