"""The suite for a first GPU: time limits, resuming, order, and wrong kernels."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks._gpu_models import MODELS, TINY, with_kernels
from benchmarks.long import _gpu_run, gpu_suite
from benchmarks.long._gpu_lines import Sizes, lines, predictable
from benchmarks.long._tasks import Report, Task, failed, run, run_all, unfinished
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.trainer.cluster import ranks
from headrace.trainer.layout.devices import ALLOCATOR
from headrace.trainer.run.config import RunConfig
from headrace.trainer.run.job import Job

ROOT = Path(__file__).parents[2]


def script(tmp_path: Path, code: str) -> tuple[str, ...]:
    """Return the command of a process with this code."""
    file = tmp_path / f"{abs(hash(code))}.py"
    file.write_text(f"import os, sys, time, signal\nfrom pathlib import Path\n{code}\n")
    return (str(file),)


# Tasks


def test_a_process_that_takes_too_long_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    code = """
import subprocess
print(subprocess.Popen(["sleep", "60"]).pid)
time.sleep(60)
"""
    report = Report(tmp_path / "lines")
    run(Task("slow", script(tmp_path, code), limit=4), report)
    started, result = report.lines
    assert result.startswith("slow: stopped after 4 s")
    until = time.monotonic() + 60
    while "sleep" in (command := command_of(int(started))) and time.monotonic() < until:
        time.sleep(0.02)
    assert "sleep" not in command


def command_of(process: int) -> str:
    """Return the command of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_an_item_that_ends_its_process_has_a_line_and_the_others_go_on(tmp_path: Path) -> None:
    code = """
for item in sys.argv[1:]:
    if item == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == "hang":
        time.sleep(60)
    print(f"{item}: measured by {os.getpid()}")
"""
    items = ("first", "crash", "second", "hang", "third", "fourth")
    task = Task("measure", script(tmp_path, code), limit=4, items=items)
    report = Report(tmp_path / "lines")
    run_all([task], report)
    results = {name: report.result(name) or "" for name in items}
    assert results["crash"].startswith("failed: killed by SIGSEGV")
    assert results["hang"].startswith("stopped after 4 s")
    processes = [results[name].removeprefix("measured by ") for name in ("first", "second")]
    assert all(map(str.isdigit, processes)) and processes[0] != processes[1]
    assert results["third"] == results["fourth"] and results["third"].startswith("measured")
    assert failed([task], report) == ["crash", "hang"]
    assert (tmp_path / "lines").read_text().splitlines() == report.lines


def test_an_item_without_a_line_is_named(tmp_path: Path) -> None:
    report = Report(None)
    run(Task("measure", script(tmp_path, "print('a: 1')"), 9, items=("a", "b")), report)
    assert report.lines == ["a: 1", "b: failed: its process ended without a line for it"]


def test_an_exit_code_is_a_failure(tmp_path: Path) -> None:
    report = Report(None)
    task = Task("check", script(tmp_path, "print('WRONG x: 1e3'); sys.exit(1)"), 9)
    run(task, report)
    assert failed([task], report) == ["check"]
    assert report.lines[0] == "WRONG x: 1e3"


def test_results_in_the_file_are_not_measured_again(tmp_path: Path) -> None:
    file, count = tmp_path / "lines", tmp_path / "count"
    code = f"with open({str(count)!r}, 'a') as file: file.write(sys.argv[1] + ' ')"
    tasks = [Task(name, (*script(tmp_path, code), name), 9) for name in ("a", "b", "c")]
    run_all(tasks[:2], Report(file))
    file.write_text(file.read_text() + "c: pas")  # killed while it wrote
    report = Report(file, resumed=True)
    assert unfinished(tasks, report) == ["c"]
    run_all(tasks, report)
    assert count.read_text() == "a b c "
    assert [line.partition(",")[0] for line in file.read_text().splitlines()] == [
        *("a: passed", "b: passed", "c: passed")
    ]
    run_all(tasks, Report(file, resumed=True, again=["b*"]))
    assert count.read_text() == "a b c b "


def test_what_the_time_does_not_allow_is_run_the_next_time(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = f"""
begun = Path({str(begun)!r})
if not begun.exists():
    begun.touch()
    time.sleep(60)
"""
    file = tmp_path / "lines"
    work = [Task(name, script(tmp_path, code), limit=90) for name in ("long", "later")]
    report = Report(file)
    began = time.monotonic()
    run_all(work, report, until=began + 2)
    assert time.monotonic() - began < 30
    assert unfinished(work, report) == ["long", "later"] and not failed(work, report)
    run_all(work, report)
    assert not unfinished(work, Report(file, resumed=True)) and not failed(work, report)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_part_leaves_complete_lines_and_goes_on(tmp_path: Path, number: int) -> None:
    again = tmp_path / "again"
    code = f"""
for item in sys.argv[1:]:
    while item == "6" and not Path({str(again)!r}).exists():
        time.sleep(0.1)
    print(f'{{item}}: ' + 'x' * 5000)
"""
    driver = f"""
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.long._tasks import *
stop_with_tasks()
task = Task("t", {script(tmp_path, code)!r}, 60, items=tuple(str(n) for n in range(12)))
run_all([task], Report(Path({str(tmp_path)!r}) / "lines", resumed=True))
"""
    command = [sys.executable, *script(tmp_path, driver)]
    file = tmp_path / "lines"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not file.exists() or file.stat().st_size < 12_000:
        time.sleep(0.02)
    process.send_signal(number)
    process.wait(60)
    before = file.read_text()
    assert before.endswith("\n") and 2 <= len(before.splitlines()) <= 6
    again.touch()
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    assert file.read_text().startswith(before)
    assert [line.split(":")[0] for line in file.read_text().splitlines()] == [
        str(n) for n in range(12)
    ]


# Parts


def options(out: Path, **given: object) -> argparse.Namespace:
    usual = {"out": out, "dry": True, "limit": 60.0, "only": None, "again": None}
    return argparse.Namespace(**(usual | given))


def test_speed_is_not_measured_behind_a_wrong_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {
        "smoke": "print('WRONG gradient of x: error 2e+00'); sys.exit(1)",
        "measure": f"Path({str(tmp_path / 'measured')!r}).touch()",
    }
    names = {1: ["smoke"], 2: ["measure"], 3: ["measure"], 4: ["measure"]}

    def tasks(part: int, _: object) -> list[Task]:
        return [Task(name, script(tmp_path, codes[name]), 9) for name in names[part]]

    monkeypatch.setattr(gpu_suite, "tasks", tasks)
    assert gpu_suite.run_part(1, options(tmp_path)) == 1
    assert gpu_suite.FIX in (tmp_path / "part-1.txt").read_text()
    for part in (2, 3):
        assert gpu_suite.run_part(part, options(tmp_path)) == 1
        assert "part 1 has wrong results: smoke" in capsys.readouterr().err
    assert not (tmp_path / "measured").exists()
    codes["smoke"] = "print('mended')"
    assert gpu_suite.run_part(1, options(tmp_path, again="smoke")) == 0
    assert gpu_suite.run_part(3, options(tmp_path)) == 0
    assert (tmp_path / "measured").exists()


def test_a_part_without_time_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = [Task("long", script(tmp_path, "time.sleep(9)"), 9)]
    monkeypatch.setattr(gpu_suite, "tasks", lambda part, _: work)
    assert gpu_suite.run_part(4, options(tmp_path, limit=0.3)) == gpu_suite.TIME_IS_UP
    assert "the time is up, 1 results are missing: run it again" in capsys.readouterr().out


def test_every_part_names_each_result_once(tmp_path: Path) -> None:
    for part in gpu_suite.PARTS:
        work = gpu_suite.tasks(part, options(tmp_path))
        names = [name for task in work for name in task.lines]
        assert len(names) == len(set(names)) and all(task.limit for task in work)
    assert gpu_suite.tasks(1, options(tmp_path))[0].name == "rates"
    [training] = gpu_suite.tasks(2, options(tmp_path))
    assert {line.name for line in lines()} < set(training.items)


def test_predictions_are_the_planners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []
    plan = {"predicted": {"seconds": 0.2, "memory": 2**30}, "engine": {"kind": "fsdp2"},
            "layers": [{"recompute": "none"}]}  # fmt: skip

    def run(command: Sequence[str], **_: object) -> SimpleNamespace:
        commands.append(" ".join(command))
        if "mamba2-1.3b" in command:
            return SimpleNamespace(returncode=2, stderr="error: no plan fits")
        return SimpleNamespace(returncode=0, stdout=json.dumps({"plan": plan}))

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_suite.main(["--predict", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "part-2.txt").read_text()
    figures = "81,920 tokens/s, 200.0 ms a step, memory 1.0 GiB, fsdp2, recompute none"
    assert f"prediction of hybrid-1b, one document on an H100: {figures}\n" in text
    assert "prediction of mamba2-1.3b, one document on an H200: failed: error: no plan fits" in text
    assert len(commands) == 2 * len(MODELS)
    assert "trainer.cli plan --json --gpus 1 --roofline --model hybrid-1b" in commands[0]
    assert commands[0].endswith("--seq-len 16384 --batch-tokens 16384 --hardware h100")


@pytest.mark.slow
def test_a_wrong_kernel_is_reported() -> None:
    """Negative control: an intact step passes, and the same step with a wrong gradient does not."""
    code = """
import sys
from unittest import mock
import torch
from support.kernels.bf16_interpreter import correct_bf16
correct_bf16()
from benchmarks.long import _gpu_smoke
from benchmarks.long._gpu_run import leave
from headrace.models.kernels import glu
_gpu_smoke.MODEL = "transformer-1b"
assert _gpu_smoke.smoke(True) == 0
right = glu.glu
def wrong(x, activation):
    y = right(x, activation)
    return y.detach() + 1.3 * (y - y.detach())  # the value, with a gradient that is 30% too large
with mock.patch.object(glu, "glu", wrong):
    assert _gpu_smoke.smoke(True) == 1
leave()
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "WRONG gradient of blocks.0.mlp" in done.stdout


# Lines


def test_models_are_the_shipped_ones() -> None:
    for name, config in MODELS.items():
        assert config == load_model_config(name)
    assert TINY.keys() == MODELS.keys()
    plain = with_kernels(MODELS["hybrid-1b"], "torch")
    assert plain.kernel == "torch" and {each.kernel for each in plain.operators.values()} == {  # type: ignore[attr-defined]
        "torch"
    }


def test_lines_cover_each_setting() -> None:
    names = [line.name for line in lines()]
    assert len(names) == len(set(names))
    for model in MODELS:
        mine = [line for line in lines() if line.model == model]
        assert {line.packed for line in mine} == {line.compiled for line in mine} == {True, False}
        assert {line.micro_batches for line in mine} == {1, 4}
        assert {line.kernels for line in mine} == {"auto", "torch"}
        assert {line.recompute for line in mine} == {"none", "block"}
        assert {line.precision for line in mine} == PRECISIONS.keys() - {"fp32"}
    assert [line.model for line in predictable()] == [*MODELS]


def test_steps_are_measured_with_the_settings_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With others it would be another program: flash attention took twice cuDNN's time."""
    seen: dict[str, object] = {}

    def initialise(backend: str, *_: object) -> None:
        seen.update(backend=backend, allocator=os.environ.get("PYTORCH_ALLOC_CONF"))

    def build_engine(job: Job, _: object) -> None:
        seen["job"] = job

    def train(*_: object, **__: object) -> None:
        seen["attention"] = torch._C._get_sdp_priority_order()[0]
        raise StopIteration

    for variable in ALLOCATOR:
        monkeypatch.setenv(variable, "")  # restored after the test
        monkeypatch.delenv(variable)
    monkeypatch.setattr(ranks, "initialise", initialise)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for name, replacement in (
        ("join", _gpu_run.join.__wrapped__),
        ("create_groups", lambda *_: SimpleNamespace(device=torch.device("cuda"))),
        ("build_engine", build_engine),
        ("load_weights", lambda *_: None),
        ("weights_of", lambda *_: {}),
        ("train", train),
    ):
        monkeypatch.setattr(_gpu_run, name, replacement)
    line = replace(lines()[0], precision="fp8", recompute="block")
    with pytest.raises(StopIteration):
        _gpu_run.measure(line, Sizes(dry=False), tmp_path / "trace")
    assert seen["backend"] == "cpu:gloo,cuda:nccl"
    assert seen["allocator"] == "expandable_segments:True"
    assert seen["attention"] == SDPBackend.CUDNN_ATTENTION.value
    job = seen["job"]
    assert isinstance(job, Job) and job.precision == PRECISIONS["fp8"]
    names, usual = [field.name for field in fields(RunConfig)], RunConfig()
    assert {name for name in names if getattr(job.run, name) != getattr(usual, name)} == {
        *("precision", "fp8", "processes", "device", "micro_batch_tokens", "recompute", "engine")
    }


def test_pairs_are_those_of_the_documents() -> None:
    sizes = Sizes(dry=False)
    assert sizes.pairs(False) == sizes.tokens / 2
    ends = sizes.boundaries(True, 3)
    wanted = sum((b - a) ** 2 for a, b in pairwise(ends)) / 2 / sizes.tokens
    assert sizes.pairs(True, 3) == pytest.approx(wanted)


def test_summary_compares_goals_predictions_and_peers() -> None:
    report = Report(None)
    for line in (
        "transformer-1b: 90,000 tokens/s, MFU 0.530, HFU 0.530",
        "hybrid-1b: 80,000 tokens/s, MFU 0.440, HFU 0.440",
        "prediction of hybrid-1b, one document on an H100: 102,500 tokens/s, 195 ms a step",
        "hybrid-1b, one document: 82,000 tokens/s, MFU 0.450, HFU 0.450",
        "transformer-1b, one document: failed: OutOfMemoryError",
        "peer of transformer-1b, by hand: 60,000 tokens/s, MFU 0.4, HFU 0.4",
        "mamba2-1.3b, one document: 0.120 tokens/s, MFU —, HFU —",  # a dry run on a busy CPU
        "prediction of mamba2-1.3b, one document on an H200: 0.240 tokens/s, 9 ms a step",
    ):
        report(line)
    found = list(gpu_suite.summary(report))
    predictions = [line.partition(":")[0] for line in report.lines if "prediction" in line]
    assert "goal of transformer-1b, MFU 0.52: 0.530, reached" in found
    assert "goal of hybrid-1b, MFU 0.52: 0.440, missed" in found
    assert "goal of transformer-1b, one document, MFU 0.54: not measured" in found
    assert "hybrid-1b, one document at 0.80x the tokens/s of " + predictions[0] in found
    assert "hybrid-1b at 0.98x the tokens/s of hybrid-1b, one document" in found
    assert "transformer-1b at 1.50x the tokens/s of peer of transformer-1b, by hand" in found
    assert "hybrid-1b at 1.33x the tokens/s of peer of transformer-1b, by hand" in found
    assert "mamba2-1.3b, one document at 0.50x the tokens/s of " + predictions[1] in found
