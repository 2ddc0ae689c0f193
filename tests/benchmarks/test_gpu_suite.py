"""The suite for a GPU: its order and time, programs that travel, runs, and the last screen."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.long import _gpu_predictions
from benchmarks.long._gpu_lines import HOST_TOKENS, lines, predictable
from benchmarks.long._tasks import Report, Task, failed
from benchmarks.long.gpu_suite import carried, install, programs, runs, suite
from benchmarks.long.gpu_suite.parts import PARTS, Part, Settings
from benchmarks.long.gpu_suite.runs import HYBRID, RUNS
from benchmarks.long.gpu_suite.summary import GOALS, PREDICTIONS, summarize

ROOT = Path(__file__).parents[2]


def script(tmp_path: Path, code: str) -> tuple[str, ...]:
    """Return the command of a process with this code."""
    file = tmp_path / f"{abs(hash(code))}.py"
    file.write_text(f"import os, sys, time, signal\nfrom pathlib import Path\n{code}\n")
    return (str(file),)


# Parts


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "bundle", tmp_path / "work", tmp_path / "out", dry=True)


def test_every_part_names_each_result_once_and_all_fit_a_quarter_of_an_hour(
    settings: Settings,
) -> None:
    assert sum(part.seconds for part in PARTS) <= 840  # a start and transfers take the rest
    tasks = [task for part in PARTS for task in part.list_tasks(settings)]
    names = [name for task in tasks for name in task.lines]
    assert len(names) == len(set(names)) and all(task.limit for task in tasks)
    assert names[0] == "attestation" and set(GOALS) < set(names)
    assert {run.title for run in (*RUNS, HYBRID)} < set(names)
    assert [name for name in names if "host" not in name and "2,048" in name] == [
        line.name for line in lines() if line.tokens == HOST_TOKENS
    ]
    for task in tasks:  # each process has a script or a module of this checkout
        module = task.command[1].replace(".", "/") + ".py"
        assert (
            (ROOT / module).exists() if task.command[0] == "-m" else Path(task.command[0]).exists()
        )


def start(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, codes: dict[str, str], **changes: object
) -> int:
    """Run parts of one process each, with this code."""
    work = {
        name: Task(name, script(settings.bundle.parent, code), limit=9)
        for name, code in codes.items()
    }
    parts = [Part(name, 60, lambda _, task=task: iter([task])) for name, task in work.items()]
    monkeypatch.setattr(suite, "PARTS", parts)
    settings.bundle.mkdir(exist_ok=True)
    settings.work.mkdir(exist_ok=True)
    (settings.bundle / PREDICTIONS).write_text("{}")
    with tarfile.open(settings.bundle / install.PROGRAMS, "w:xz"):
        pass
    usual = {"command": "dry", "bundle": settings.bundle, "work": settings.work}
    usual |= {"out": settings.out, "minutes": 1.0, "after": None, "only": None, "again": None}
    return suite.run(argparse.Namespace(**usual | changes), time.time())


def test_the_suite_goes_on_behind_a_failure_and_behind_its_time(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = settings.bundle.parent / "begun"
    slow = f"""
if not Path({str(begun)!r}).exists():
    Path({str(begun)!r}).touch()
    time.sleep(60)
print("late")
"""
    codes = {"a": "print('WRONG x: 1e3'); sys.exit(1)", "b": "print('fine')", "c": slow}
    assert start(settings, monkeypatch, codes, minutes=0.03) == 1
    text = capsys.readouterr().out
    assert "b: passed" in text and "1 results failed, 1 are missing" in text
    assert "  failed: a: failed: exit code 1" in text and "  missing: c" in text
    shutil.rmtree(settings.out)  # a second call on the same machine
    codes["a"] = "print('mended')"
    assert start(settings, monkeypatch, codes, again="a") == 0
    text = (settings.out / suite.RESULTS).read_text()
    assert text.count("fine") == 1 and "mended" in text and "late" in text


# Programs that travel


def test_a_program_has_the_same_name_for_every_triton() -> None:
    """Its name holds what decides its binary, and nothing of the compiler."""

    def name(**changes: Any) -> str:
        function = SimpleNamespace(__module__="headrace.models.kernels.glu", __name__="forward")
        source = {
            "fn": SimpleNamespace(fn=function, src="def forward(): pass"),
            "signature": {"x": "*fp32", "length": "i32"},
            "constants": {(2,): 7},
            "attrs": {(0,): [["tt.divisibility", 16]], (1,): []},
        }
        options = {"num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": None, "new": 1}
        source |= {key: value for key, value in changes.items() if key in source}
        options |= {key: value for key, value in changes.items() if key in options}
        return carried.name_program(SimpleNamespace(**source), SimpleNamespace(**options))

    assert name() == name(new=2) == name(attrs={(0,): [["tt.divisibility", 16]]})
    different_names = [
        name(attrs={}),
        name(constants={(2,): 8}),
        name(signature={"x": "*bf16", "length": "i32"}),
        name(num_warps=8),
        name(maxnreg=128),
    ]
    assert len({name(), *different_names}) == 6


@pytest.mark.slow
def test_carried_programs_are_found_in_the_cache(tmp_path: Path) -> None:
    """A program that this Triton has compiled is packed, installed and found under its name: no
    compiler runs. The other process has no headrace key but that of `sitecustomize`."""
    site, cache, work = tmp_path / "site", tmp_path / "cache", tmp_path / "work"
    site.mkdir()
    shutil.copyfile(Path(carried.__file__), site / "sitecustomize.py")
    listing = """
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from headrace.models.attestation.plan import AttestationPlan
from headrace.models.compilation.launches import list_launches
from headrace.models.compilation.worker import list_programs
launches, _ = list_launches(None, [], plan=AttestationPlan(kernels=["rope"], dtypes=["bfloat16"]))
program = list_programs(launches, 90)[0]
compiled = lambda: triton.compile(program.source, GPUTarget("cuda", 90, 32), program.options)
"""
    packing = f"""{listing}
from benchmarks.long.gpu_suite.install import install_programs
from benchmarks.long.gpu_suite.programs import pack
compiled()
assert pack([program], Path({str(cache)!r}), Path({str(tmp_path / "archive")!r})) == 1
print(install_programs(Path({str(tmp_path / "archive")!r}), Path({str(work)!r}), True))
"""
    finding = f"""{listing}
from unittest import mock
from triton.backends.nvidia.compiler import CUDABackend
with mock.patch.object(CUDABackend, "add_stages", side_effect=AssertionError("compiled again")):
    kernel = compiled()
print(len(kernel.asm["cubin"]), kernel.metadata.shared, kernel.metadata.name)
"""
    outputs = []
    for code, folder, paths in ((packing, cache, []), (finding, work, [str(site)])):
        path = os.pathsep.join([*paths, str(ROOT / ".root"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split())
    assert outputs[0][0] == "1" and int(outputs[1][0]) > 1000


@pytest.mark.slow
def test_programs_of_times_and_limits_are_known_before_the_launch() -> None:
    """Next programs too, and those for more than 2³¹ elements: offsets of 64 bits."""
    launches, problems = programs.list_times()
    assert not problems
    names = {launch.program.fn.__name__ for launch in launches}
    assert {"delta_outputs", "ssd_outputs", "ssd_chunk_outputs"} <= names
    launches, problems = programs.list_limits()
    assert not problems and len({launch.program for launch in launches}) > 40


# Runs


def test_losses_far_from_those_of_the_cpu_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / runs.LOSSES).write_text(json.dumps({"tiny-moe": [6.0, 5.0]}))
    [run] = [run for run in RUNS if run.name == "grouped experts"]
    for losses, verdict in (
        ([6.0, 5.05], "loss 6.0000 to 5.0500"),
        ([6.0, 5.2], "WRONG: loss 6.0"),
        ([6.0, float("nan")], "WRONG: loss 6.0"),
    ):
        monkeypatch.setattr(runs, "train", lambda *_, losses=losses: (losses, 1.0))
        assert runs.compare(run, tmp_path, tmp_path, dry=False).startswith(verdict)
    monkeypatch.setattr(runs, "train", lambda *_: ([6.0], 1.0))
    with pytest.raises(RuntimeError, match="1 steps instead of 2"):
        runs.compare(run, tmp_path, tmp_path, dry=False)


def test_a_run_that_was_stopped_and_resumed_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result begins with no word of a failure."""
    steps = [{"loss": 6.0 - n, "tokens_per_second": 9.0} for n in range(6)]
    for name, value in {"call": 1.0, "read_steps": steps, "read_events": []}.items():
        monkeypatch.setattr(runs, name, lambda *_, value=value: value)
    report = Report(None)
    report(f"{HYBRID.title}: {'; '.join(runs.train_hybrid(tmp_path, tmp_path, dry=True))}")
    assert not failed([Task("t", (), 9, items=(HYBRID.title,))], report)


def test_a_command_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"`trainer run` ended with 2: .*no-model"):
        runs.call(["trainer", "run", "--model", "no-model", "--dry-run"], tmp_path)


# Predictions


def test_predictions_are_the_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []
    plan = {"predicted": {"seconds": 0.2, "memory": 2**30}, "engine": {"kind": "fsdp2"},
            "layers": [{"recompute": "none"}]}  # fmt: skip

    def run(command: Sequence[str], **_: object) -> SimpleNamespace:
        commands.append(" ".join(command))
        if len(commands) > 1:
            return SimpleNamespace(returncode=2, stderr="error: no plan fits")
        return SimpleNamespace(returncode=0, stdout=json.dumps({"plan": plan}))

    monkeypatch.setattr(subprocess, "run", run)
    first = _gpu_predictions.predict(predictable()[0])
    assert first["tokens_per_second"] == 81_920 and first["memory"] == 2**30
    assert _gpu_predictions.predict(predictable()[-1]) == {"failed": "error: no plan fits"}
    assert "trainer.cli plan --json --gpus 1 --roofline --model " in commands[0]
    assert commands[0].endswith("--seq-len 16384 --batch-tokens 16384 --hardware h100")
    assert commands[1].endswith("--seq-len 8192 --batch-tokens 8192 --hardware h100")


def test_the_last_screen_has_goals_predictions_and_peers(tmp_path: Path) -> None:
    report = Report(None)
    for line in (
        "transformer-1b: 90,000 tokens/s, MFU 0.530, HFU 0.530, engine 5.0%, idle 1.0%",
        "hybrid-1b: 80,000 tokens/s, MFU 0.440, HFU 0.440, engine 5.0%, idle 3.0%",
        "hybrid-1b, one document: 82,000 tokens/s, MFU 0.450, memory 38.2 GiB allocated",
        "hybrid-1b, fp8: 120,000 tokens/s, MFU 0.6",
        "transformer-1b, one document: 60,000 tokens/s, MFU 0.5",
        "peer of transformer-1b, by hand: 40,000 tokens/s, MFU 0.4, HFU 0.4",
        "mamba2-1.3b: failed: OutOfMemoryError",
    ):
        report(line)
    predictions = {"hybrid-1b, one document": {"tokens_per_second": 102_500, "memory": 2**35}}
    (tmp_path / PREDICTIONS).write_text(json.dumps(predictions))
    task = Task("steps", (), 9, items=("hybrid-1b", "mamba2-1.3b", "mamba2-1.3b, fp8"))
    screen = list(summarize(report, [task], tmp_path))
    for line in (
        "MFU of transformer-1b: goal 0.52 (by hand 0.503): 0.530, reached",
        "  idle 1.0% (goal 2), engine 5.0% (goal 7): reached",
        "MFU of hybrid-1b: goal 0.52 (none published): 0.440, missed",
        "  idle 3.0% (goal 2), engine 5.0% (goal 7): missed",
        "MFU of mamba2-1.3b: goal 0.42 (mamba_ssm's kernels): not measured",
        "hybrid-1b, one document: 0.80x the tokens/s that `trainer plan` predicts; 32.0 GiB "
        "predicted, 38.2 seen",
        "transformer-1b, one document at 1.50x the tokens/s of peer of transformer-1b, by hand",
        "hybrid-1b, fp8 at 1.50x the tokens/s of hybrid-1b",
        "1 results failed, 1 are missing",
        "  failed: mamba2-1.3b: failed: OutOfMemoryError",
        "  missing: mamba2-1.3b, fp8",
    ):
        assert line in screen
