"""Hardware files: their figures, interpolation, and prices of collectives."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.console.errors import ConfigError, PlanError, StorageError
from headrace.planner.hardware import Hardware, shipped_hardware
from headrace.planner.hardware.file import CollectiveRate, KernelRate
from headrace.planner.hardware.interpolation import RateTable

MIB = 1 << 20


@pytest.fixture(scope="module")
def h100() -> Hardware:
    return Hardware.load("h100")


def changed(hardware: Hardware, **tables: object) -> Hardware:
    return Hardware(replace(hardware.file, **tables), "here.yaml")  # type: ignore[arg-type]


# Files


@pytest.mark.parametrize("name", shipped_hardware())
def test_shipped_clusters_answer_and_use_each_source(name: str) -> None:
    hardware = Hardware.load(name)
    figure = hardware.rate("matmul", m=8192, k=4096, n=4096, precision="bf16")
    [peak] = [row.rate for row in hardware.file.peaks if row.precision == "bf16"]
    assert 0.7 * peak < figure < peak
    kinds = {source.kind for source in hardware.file.sources.values()}
    assert {"published", "computed"} <= kinds <= {"published", "computed", "measured", "fitted"}
    assert ("fitted" in kinds) == (hardware.file.attained is not None)
    assert hardware.file.overhead is not None and hardware.file.overhead.operation > 1e-6
    rows = [row for _, row in hardware.file.rows()]
    assert {row.source for row in rows} == set(hardware.file.sources)
    for direction in ("forward", "backward"):
        at = {"head_width": 128, "heads": 16, "length": 8192, "precision": "bf16"}
        assert hardware.rate("attention", direction=direction, **at) < peak
    assert hardware.seconds("all-reduce", MIB, 8) < hardware.seconds("all-reduce", MIB, 16)


def test_hardware_needs_no_torch() -> None:
    code = (
        "import sys; from headrace.planner.hardware import Hardware; Hardware.load('h100');"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_saved_file_is_equal(h100: Hardware, tmp_path: Path) -> None:
    h100.save(tmp_path / "copy.yaml")
    copy = Hardware.load(tmp_path / "copy.yaml")
    assert copy.file == h100.file and copy.digest == h100.digest
    assert changed(h100, devices_per_node=4).digest != h100.digest


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("source: infiniband", "source: ib", "links.network.source: `ib` is not one of"),
        ("date: 2022-09", "date: lately", "sources.datasheet.date: must be YYYY-MM-DD"),
        ("  node: {bandwidth", "  nodes: {bandwidth", "links.nodes: should be 'node' or 'network'"),
        ("precision: bf16, rate: 7", "precision: bf16, rates: 7", "did you mean `rate`?"),
        ("compute: 1.02", "compute: 0", "overlap.network.compute: must be above 0"),
        ("bytes: 3_398MB", "bytes: 3_398GB", "reserved.bytes: must be below the memory"),
        ("devices_per_node: 8", "devices_per_node: 0", "must be at least 1, not 0"),
    ],
)
def test_a_wrong_file_names_the_line(old: str, new: str, problem: str, tmp_path: Path) -> None:
    text = shipped_hardware()["h100"].read_text()
    assert text.count(old) == 1
    file = tmp_path / "wrong.yaml"
    file.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        Hardware.load(file)
    line = text[: text.index(old)].count("\n") + 1
    assert problem in str(caught.value)
    assert line in [item.line for item in caught.value.problems]


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(PlanError, match="did you mean `h100`") as caught:
        Hardware.load("h10")
    assert "trainer profile" in str(caught.value)
    with pytest.raises(StorageError, match=r"file not found: gone\.yaml"):
        Hardware.load("gone.yaml")


# Rates


def table_of(points: dict[tuple[float, ...], float]) -> RateTable:
    return RateTable(list(points.items()))


@given(
    values=st.dictionaries(st.integers(1, 1 << 20), st.floats(1e-3, 1e15), min_size=1, max_size=6),
    asked=st.floats(0, 1 << 21),
)
def test_one_coordinate_is_interpolated_as_numpy_does(
    values: dict[int, float], asked: float
) -> None:
    result = table_of({(x,): rate for x, rate in values.items()}).interpolate((asked,))
    known = sorted(values)
    logs = np.log([values[x] for x in known])
    assert math.isclose(
        result, math.exp(np.interp(math.log1p(asked), np.log1p(known), logs)), rel_tol=1e-6
    )


@given(
    rows=st.dictionaries(
        st.tuples(*[st.integers(0, 1 << 16)] * 3), st.floats(1, 1e15), min_size=1, max_size=12
    ),
    asked=st.tuples(*[st.integers(0, 1 << 17)] * 3),
)
def test_a_row_gives_its_rate_and_no_answer_leaves_the_rates(
    rows: dict[tuple[float, ...], float], asked: tuple[float, ...]
) -> None:
    table = table_of(rows)
    for point, rate in rows.items():
        assert table.interpolate(point) == rate
    between = table.interpolate(asked)
    assert min(rows.values()) * (1 - 1e-9) <= between <= max(rows.values()) * (1 + 1e-9)


def test_a_rate_beyond_the_rows_is_the_nearest(h100: Hardware) -> None:
    at = {"head_width": 128, "heads": 16, "precision": "bf16", "direction": "forward"}
    assert 521e12 < h100.rate("attention", length=3000, **at) < 579e12
    lengths = [row.length for row in h100.file.attention if row.head_width == 128]
    longest = h100.rate("attention", length=max(lengths), **at)
    assert h100.rate("attention", length=1 << 20, **at) == longest


def test_a_missing_row_says_what_to_run(h100: Hardware) -> None:
    at = {"width": 4096, "length": 8192, "precision": "bf16", "direction": "backward"}
    with pytest.raises(PlanError, match="no rate of delta") as caught:
        h100.rate("delta", **at)
    assert "direction backward" in str(caught.value) and "trainer profile" in str(caught.value)
    row = KernelRate(kernel="delta", rate=1e10, source="nvlink", **at)  # type: ignore[arg-type]
    assert changed(h100, kernels=(row,)).rate("delta", **at) == 1e10
    with pytest.raises(PlanError, match="no rate of matmul"):
        h100.rate("matmul", m=1, k=1, n=1, precision="fp32")


# Collectives


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (("all-reduce", 1e9, 8, 8), 14 * 1.9e-6 + 2 * 7 / 8 * 1e9 / 370.8e9),
        (("all-gather", 1e9, 16, 8), 14 * 1.9e-6 + 4e-6 + 15 / 16 * 1e9 / 370.8e9),
        (("reduce-scatter", 1e9, 4, 1), 3 * 4e-6 + 3 / 4 * 1e9 / 48.5e9),
        (("all-gather", 1e9, 8, 4), 6 * 1.9e-6 + 4e-6 + 7 / 8 * 1e9 / (4 * 48.5e9)),
        (("all-to-all", 1e9, 16, 8), 4e-6 + 8 / 16 * 1e9 / 48.5e9),
        (("p2p", 1e9, 2, 1), 4e-6 + 1e9 / 48.5e9),
        (("p2p", 1e9, 2, 2), 1.9e-6 + 1e9 / 370.8e9),
        (("all-reduce", 1e9, 1, 1), 0.0),
    ],
)
def test_links_price_collectives_without_rows(
    h100: Hardware, ask: tuple[str, float, int, int], expected: float
) -> None:
    best = changed(h100, attained=None)
    assert math.isclose(best.seconds(*ask), expected, rel_tol=1e-9)


def test_messages_slow_down_with_each_doubling_of_the_nodes(h100: Hardware) -> None:
    size, hop = 1e12, 4e-6
    attained = h100.file.attained
    assert attained is not None and attained.doubling < 1 < attained.node
    for doublings in (1, 2, 8):
        ranks = 2**doublings
        seconds = h100.seconds("all-gather", size, ranks, 1) - (ranks - 1) * hop
        bandwidth = 48.5e9 * attained.doubling**doublings
        assert math.isclose(seconds, (ranks - 1) / ranks * size / bandwidth, rel_tol=1e-6)
    within = h100.seconds("all-gather", size, 8)
    assert math.isclose(within, 7 / 8 * size / (370.8e9 * attained.node), rel_tol=1e-4)


def test_a_size_far_from_the_measured_ones_is_named(h100: Hardware) -> None:
    at = {"head_width": 128, "heads": 16, "precision": "bf16", "direction": "forward"}
    assert h100.find_outside("attention", length=32_768, **at) is None
    assert h100.find_outside("attention", length=65_536, **at) == (
        "length 65,536, measured at 512 to 16,384"
    )
    point = {"size": 128, "width": 4096, "precision": "bf16", "direction": "forward"}
    assert h100.find_outside("ssd", length=1024, **point) == "length 1,024, measured at 16,384"


def test_rows_of_a_collective_count_before_the_link(h100: Hardware) -> None:
    def row(size: int, rate: float, ranks: int = 8, per_node: int = 8) -> CollectiveRate:
        return CollectiveRate(
            collective="all-gather",
            ranks=ranks,
            per_node=per_node,
            bytes=size,
            rate=rate,
            source="nvlink",
        )

    measured = changed(h100, collectives=(row(MIB, 1e10), row(64 * MIB, 1e11)))
    seconds = measured.seconds("all-gather", MIB, 8)
    assert math.isclose(seconds, 7 / 8 * MIB / 1e10)
    assert measured.seconds("all-gather", 1, 8) == seconds  # a latency, not a bandwidth
    assert math.isclose(measured.seconds("all-gather", 640 * MIB, 8), 7 / 8 * 640 * MIB / 1e11)
    for ask in (("all-gather", MIB, 16), ("all-reduce", MIB, 8)):  # priced by the links
        assert measured.seconds(*ask) == h100.seconds(*ask)


def test_a_missing_link_is_named(h100: Hardware) -> None:
    alone = changed(h100, links={"node": h100.file.links["node"]}, overlap={})
    assert alone.seconds("all-gather", MIB, 8) > 0
    with pytest.raises(PlanError, match=r"links\.network") as caught:
        alone.seconds("all-gather", MIB, 16)
    assert "profile --links" in str(caught.value)
    with pytest.raises(PlanError, match=r"overlap\.network"):
        alone.overlap("network")
    with pytest.raises(PlanError, match="describes 2 nodes, and the group has 4"):
        changed(h100, nodes=2).seconds("p2p", 1, 4, 1)


def test_rows_refuse_figures_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        CollectiveRate(collective="p2p", ranks=2, per_node=1, bytes=8, rate=math.inf, source="a")
    with pytest.raises(ValueError, match="3 ranks cannot be 2 on each node"):
        CollectiveRate(collective="p2p", ranks=3, per_node=2, bytes=8, rate=1.0, source="a")
