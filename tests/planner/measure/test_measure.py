"""Measurements of blocks, kernels and collectives, on a CPU."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from formats.samples import pin_keys
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks._collectives import Count
from headrace.console.errors import MisuseError, StorageError
from headrace.console.headrace import main
from headrace.planner.hardware.links import COLLECTIVES, bus_factor
from headrace.planner.measure import blocks, kernels, tables
from headrace.planner.measure.clock import Clock
from headrace.planner.measure.collectives import (
    CollectiveTime,
    GroupShape,
    RankGroup,
    World,
    make_collective,
    round_size,
)
from headrace.planner.measure.overlap import compute_slowdowns

CPU = torch.device("cpu")
QUICK = Clock(CPU, 0.0)


# Clock


def test_the_median_of_the_runs_counts() -> None:
    times = iter([5.0, 1.0, 9.0, 2.0, 3.0])
    runs: list[int] = []

    class Fake(Clock):
        def once(self, run: Callable[[], object]) -> float:
            run()
            return next(times)

    assert Fake(CPU, 0.0).seconds(lambda: runs.append(1)) == 3.0
    assert len(runs) == 6  # one is not counted


def test_the_backward_pass_is_timed_alone() -> None:
    passes: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            passes.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx: object, *above: torch.Tensor) -> torch.Tensor:
            passes.append("backward")
            return above[0] * 2

    x = torch.ones(3, requires_grad=True)
    QUICK.passes(lambda x: Watched.apply(x), {"x": x})
    assert passes == ["forward"] * 7 + ["backward"] * 6


# Blocks


@pytest.mark.parametrize("name", blocks.BLOCKS)
def test_each_block_is_measured(name: str) -> None:
    row = blocks.measure_block(name, 64, 32, 2, "fp32", QUICK).row
    assert all(row[item] > 0 for item in row if isinstance(row[item], float))
    assert row["parameters"] > 64**2


def test_operations_of_blocks() -> None:
    width, length = 128, 64
    attention = blocks.measure_block("attention", width, length, 2, "fp32", QUICK)
    pairs = length / 2  # each token sees half of the row
    flops_per_token = 2 * 4 * width**2 + 2 * 2 * width * pairs
    assert attention.flops == 2 * length * flops_per_token
    mlp = blocks.measure_block("mlp", width, length, 1, "fp32", QUICK)
    hidden = 344
    assert mlp.parameters == 3 * width * hidden + width
    assert mlp.flops == length * 2 * 3 * width * hidden
    stream, held = length * width * 4, mlp.parameters * 4
    assert mlp.bytes == (2 * stream + held, 3 * stream + 2 * held)


def test_blocks_that_cannot_be_built() -> None:
    with pytest.raises(MisuseError, match="no block `rnn`"):
        blocks.build_block("rnn", 64)
    with pytest.raises(MisuseError, match="width 100 cannot be built"):
        blocks.build_block("mamba2", 100)


def test_attention_and_products_have_plausible_rates() -> None:
    forward, backward = kernels.measure_attention(2, 32, 64, 2, "fp32", QUICK)
    rate = kernels.measure_matmul(64, 64, 64, 1, "fp32", QUICK)
    grouped = kernels.measure_matmul(16, 64, 64, 4, "fp32", QUICK)
    assert all(1e5 < item < 1e14 for item in (forward, backward, rate, grouped))
    assert 1e6 < kernels.measure_copy(1 << 16, QUICK) < 1e13


@pytest.mark.parametrize("groups", [1, 4])
def test_measured_products_are_whole(groups: int) -> None:
    x, weights = torch.randn(groups * 6, 8), torch.randn(groups, 5, 8)
    expected = torch.einsum("gmk, gnk -> gmn", x.view(groups, 6, 8), weights).flatten(0, 1)
    torch.testing.assert_close(kernels.make_product(x, weights)(), expected)


# Collectives


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[dist.ProcessGroup | None]:
    """A group of four ranks, of which this process is one and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bus_bytes_are_those_of_ring_algorithms(
    collective: str, four_ranks: dist.ProcessGroup | None
) -> None:
    size = round_size(collective, 4100, 4)
    group = RankGroup(GroupShape(4, 1), range(4), four_ranks)
    run = make_collective(collective, size, group, World(1, 4, 4, CPU))
    with Count() as count:
        run()
    assert sum(count.calls.values()) == 1
    assert sum(count.bytes.values()) == bus_factor(collective, 4) * size


def test_lines_are_those_of_nccl_tests() -> None:
    time = CollectiveTime("all-reduce", 8, 8, 1 << 30, 4e-3)
    assert math.isclose(time.algbw, (1 << 30) / 4e-3)
    assert math.isclose(time.busbw, time.algbw * 2 * 7 / 8)
    words = time.line().split()
    assert words[:4] == ["1073741824", "268435456", "float", "sum"]
    assert words[-3:] == ["4000.00", "268.44", "469.76"]


@pytest.mark.parametrize(
    ("collective", "count"),
    [
        ("all-reduce", "1024"),
        ("p2p", "1024"),
        ("all-gather", "512"),
        ("reduce-scatter", "512"),
        ("all-to-all", "512"),
    ],
)
def test_the_count_is_the_elements_of_a_rank(collective: str, count: str) -> None:
    """As nccl-tests prints it for 4,096 bytes on two ranks."""
    time = CollectiveTime(collective, 2, 2, 4096, 1e-3)
    assert time.line().split()[:2] == ["4096", count]
    assert str(time.row["count"]) == count
    assert math.isclose(time.algbw, 4096 / 1e-3)


@given(nodes=st.integers(1, 6), per_node=st.integers(1, 8))
def test_groups_of_a_shape_share_no_rank(nodes: int, per_node: int) -> None:
    world = World(0, nodes * per_node, per_node, CPU)
    shapes = world.shapes()
    assert (nodes * per_node > 1) == bool(shapes)
    assert {shape.link for shape in shapes} == {
        link for link, there in (("node", per_node > 1), ("network", nodes > 1)) if there
    }
    for shape in shapes:
        groups = world.members(shape)
        ranks = [rank for group in groups for rank in group]
        assert ranks and len(ranks) == len(set(ranks)) <= world.size
        for group in groups:
            places = [rank % per_node for rank in group]
            assert len(group) == shape.ranks
            assert len({rank // per_node for rank in group}) == shape.nodes
            assert len(set(places)) == shape.per_node
    whole = GroupShape(per_node, nodes)
    assert world.members(whole) == [list(range(world.size))]


# Overlap

times = st.floats(0.1, 10)
factors = st.floats(1, 5)


@given(compute=times, messages=times, slower=factors, later=factors)
def test_slowdowns_are_recovered(
    compute: float, messages: float, slower: float, later: float
) -> None:
    together = min(compute * slower, messages * later)
    ends = (
        together + compute - together / slower,
        together + messages - together / later,
    )
    result = compute_slowdowns((compute, messages), ends)
    assert result == pytest.approx((slower, later), rel=1e-6)


def test_what_waits_has_the_worst_slowdown() -> None:
    assert compute_slowdowns((1.0, 1.0), (1.0, 2.0)) == (1.0, 10.0)
    assert compute_slowdowns((1.0, 1.0), (0.9, 0.9)) == (1.0, 1.0)


# Commands


def test_the_table_of_blocks(tmp_path: Path) -> None:
    table, picture = tmp_path / "blocks.csv", tmp_path / "blocks.svg"
    words = ["bench", "blocks", "mlp", "se", "--width", "64", "--length", "16", "--length", "32"]
    words += ["--seconds", "0", "--csv", str(table), "--plot", str(picture), "--json"]
    result = CliRunner().invoke(main, [*words, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(table.open()))
    printed = json.loads(result.stdout)
    pin_keys("bench-blocks", printed)
    places = [("mlp", "16", "2"), ("mlp", "32", "1"), ("se", "16", "2"), ("se", "32", "1")]
    assert [(row["block"], row["length"], row["rows"]) for row in rows] == places
    assert [float(row["forward ms"]) for row in rows] == [row["forward ms"] for row in printed]
    assert picture.read_text().count("<polyline") == 4 * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["blocks", "rnn"], "no block `rnn`"),
        (["blocks", "mlp", "--plot", "a.pdf"], "a.pdf is no picture"),
        (["blocks", "mlp", "--csv", "gone/a.csv"], "the folder of gone/a.csv does not exist"),
        (["blocks", "--width", "0"], "0 is not in the range"),
        (["collectives", "gossip"], "no collective gossip"),
        (["collectives", "--begin", "64B"], "64B"),
        (["collectives", "--begin", "2MiB", "--end", "1MiB"], "is above --end"),
        (["collectives", "--processes", "1", "--device", "cpu"], "need two ranks or more"),
    ],
)
def test_misuse_of_the_commands(words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", *words])
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_a_full_disk_leaves_the_files_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"block": "mlp", "width": 8, "length": 2**n, "speed": 1.5 * n} for n in (1, 2)]
    csv_file, picture = tmp_path / "rows.csv", tmp_path / "rows.svg"

    def write() -> None:
        with contextlib.suppress(StorageError):
            tables.write_csv(rows, str(csv_file))
        tables.draw(
            rows, str(picture), line="block", panel="width", across="length", shown=["speed"]
        )

    write()
    before = csv_file.read_bytes(), picture.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    rows.append({**rows[0], "length": 8})
    with pytest.raises(StorageError, match=r"cannot write .*rows\.svg: the disk is full"):
        write()
    assert (csv_file.read_bytes(), picture.read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "rows.svg"]
