"""Profiles of this machine: quick ones, really measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.ranks.ranks import Ranks

from headrace.console import config as reader
from headrace.console.errors import PlanError
from headrace.planner.hardware import Hardware
from headrace.planner.hardware.links import COLLECTIVES
from headrace.planner.measure import profile as profiles
from headrace.planner.measure.clock import Clock
from headrace.planner.measure.kernels import KERNELS, list_sizes
from headrace.trainer.cli import main


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("profile") / "here.yaml"
    words = ["profile", "--quick", "--device", "cpu", "--processes", "2", "--out", str(file)]
    threads = torch.get_num_threads()
    result = CliRunner().invoke(main, words)
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    return file


def test_a_profile_answers_for_every_kernel(measured: Path) -> None:
    hardware = Hardware.load(measured)
    at = {"width": 64, "length": 128, "precision": "fp32", "direction": "backward"}
    for kernel in KERNELS:
        rate = hardware.rate(kernel, size=list_sizes(kernel, 128, [512])[0], **at)
        assert rate in [row.rate for row in hardware.file.kernels if row.kernel == kernel]
    [source] = hardware.file.sources.values()
    assert source.kind == "measured" and "trainer profile" in source.text
    assert hardware.rate("matmul", m=64, k=256, n=64, precision="fp32") > 1e6
    assert hardware.rate("matmul", groups=8, m=64, k=64, n=64, precision="fp32") > 1e6
    assert hardware.rate("memory", bytes=1 << 16) > 1e6
    attention = {"heads": 2, "head_width": 32, "length": 64, "precision": "fp32"}
    assert hardware.rate("attention", direction="forward", **attention) > 1e6
    overhead = hardware.file.overhead
    assert overhead is not None and 1e-7 < overhead.operation < 1e-3 and overhead.step == 0
    assert hardware.usable_memory < hardware.file.device.memory
    with pytest.raises(PlanError, match=r"links\.node"):
        hardware.seconds("all-reduce", 1 << 20, 2)


def test_a_profile_answers_for_a_plan_with_experts(measured: Path) -> None:
    words = ["plan", "--model", "tiny-moe", "--seq-len", "64", "--batch-tokens", "256"]
    result = CliRunner().invoke(main, [*words, "--hardware", str(measured), "--gpus", "1"])
    assert result.exit_code == 0, result.output


def test_a_profile_measures_what_is_missing_alone(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = reader.read_yaml(measured)
    lost = data["kernels"].pop(), data["matmul"].pop(0)
    data["overhead"] = None
    file = tmp_path / "interrupted.yaml"
    file.write_text(reader.dump(data))
    sizes, clock = profiles.SIZES["cpu", True], Clock(torch.device("cpu"), 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: data["device"]["threads"])
    begun = profiles.open_profile(file, None, clock.device, 2, "quick")
    assert profiles.measure_device(begun, sizes, clock) == 3
    again = Hardware.load(file).file
    assert again.kernels[-1].kernel == lost[0]["kernel"]
    assert again.overhead is not None
    assert (again.matmul[-1].m, again.matmul[-1].n) == (lost[1]["m"], lost[1]["n"])
    assert profiles.measure_device(begun, sizes, clock) == 0


def test_the_file_of_another_machine_is_refused(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match="number of devices on a node is 2, not 4"):
        profiles.open_profile(measured, None, torch.device("cpu"), 4, "quick")
    data, _ = reader.read_yaml(measured)
    data["device"]["name"] = "abacus"
    foreign_file = measured.with_name("other.yaml")
    foreign_file.write_text(reader.dump(data))
    with pytest.raises(PlanError, match="its device is abacus"):
        profiles.open_profile(foreign_file, None, torch.device("cpu"), 2, "quick")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with pytest.raises(PlanError, match=r"number of threads of a rank is \d, not 7"):
        profiles.open_profile(measured, None, torch.device("cpu"), 2, "quick")


@pytest.mark.parametrize(("per_node", "link"), [(2, "node"), (1, "network")])
def test_links_are_measured(
    per_node: int, link: str, tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    """Two ranks on one node, and on two nodes of one rank each."""
    file = tmp_path / "links.yaml"
    messages = profiles.SIZES["cpu", True].messages
    assert ranks(2).run("measured_links.profile_links", str(file), per_node) == [
        len(COLLECTIVES) * len(messages),
        None,
    ]
    hardware = Hardware.load(file)
    assert not hardware.file.links  # rows alone can answer
    for collective in COLLECTIVES:
        seconds = hardware.seconds(collective, messages[-1], 2, per_node)
        assert 1e-6 < seconds < 10
    assert all(1 <= factor <= 10 for factor in hardware.overlap(link))
    assert ranks(2).run("measured_links.profile_links", str(file), per_node)[0] == 0
    again = Hardware.load(file).file
    assert (again.collectives, again.overlap) == (hardware.file.collectives, hardware.file.overlap)


def test_all_ranks_see_the_slowest_time(ranks: Callable[[int], Ranks]) -> None:
    rows = ranks(2).run("measured_links.times_of_all", ["all-gather", "p2p"], [1 << 12])
    assert rows[0] == rows[1]
    assert [row["collective"] for row in rows[0]] == ["all-gather", "p2p"]


def test_ranks_of_a_launcher_measure_links_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(main, ["profile", "--out", "here.yaml", "--device", "cpu"])
    assert result.exit_code == 2 and "add --links" in result.output
