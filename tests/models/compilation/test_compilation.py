"""Programs of a model are compiled for a GPU that is not there, and kept; what was damaged is
compiled again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from click.testing import CliRunner
from formats.samples import pin_keys
from support.ranks.ports import free_ports

from headrace.console.errors import LayoutError, MissingError, MisuseError
from headrace.models.accounting.shape import Shape
from headrace.models.accounting.state import Degrees
from headrace.models.compilation import cache, compile, tools, worker
from headrace.models.compilation.by_hand import parse_arch, render
from headrace.models.compilation.cli import main
from headrace.models.compilation.compile import compile_programs
from headrace.models.compilation.launches import list_launches
from headrace.models.compilation.worker import Compilation
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS

MODEL = "tiny-transformer"
ROOT = Path(__file__).parents[3]


def request(**changes: Any) -> worker.Request:
    shape = Shape(rows=2, seq_len=64, precision=PRECISIONS["bf16"], device="cuda")
    settings = {"config": load_model_config(MODEL), "shapes": [shape], "arch": 90, "processes": 2}
    return worker.Request(**{**settings, **changes})


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A cache that the command has filled, and its answer."""
    folder = tmp_path_factory.mktemp("programs")
    words = ["compile", MODEL, "--out", str(folder), "--seq-len", "64", "--rows", "2"]
    done = CliRunner().invoke(main, [*words, "--no-attestation", "--json"], catch_exceptions=False)
    answer: dict[str, Any] = json.loads(done.stdout)
    return folder, answer


@pytest.fixture
def copied(
    filled: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The same cache in another place."""
    shutil.copytree(filled[0], tmp_path / "cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    return tmp_path / "cache"


def compile_here(**changes: Any) -> Compilation:
    """Compile as the worker does, in this process."""
    *_, last = worker.run(request(**changes))
    return Compilation(**last["result"])


def test_the_command_fills_a_cache(filled: tuple[Path, dict[str, Any]]) -> None:
    folder, answer = filled
    pin_keys("kernels-compile", {**answer, "compiled": list(answer["compiled"].values())})
    pin_keys("programs", {**json.loads((folder / cache.FILE).read_text()), "programs": {}})
    names = Counter(name.split()[0] for name in answer["compiled"])
    assert names["rope_rotate"] == 4, "forward and backward, packed and not"
    assert {"glu_backward", "rms_norm_backward", "linear_cross_entropy_scale"} <= set(names)
    assert answer["programs"] == len(answer["compiled"]) == len(list(folder.glob("*/*.cubin")))
    assert not answer["unknown"] and not answer["problems"] and answer["arch"] == "sm_90"
    for binary in folder.glob("*/*.cubin"):
        assert cache.is_whole_elf(binary.read_bytes())


def test_a_second_start_compiles_nothing(copied: Path) -> None:
    done = compile_here()
    assert done.compiled == {} and done.remarks() == []
    assert str(done) == f"all {done.programs} programs are in {copied}"
    group = next(copied.glob("*/__grp__*"))
    paths = json.loads(group.read_text())["child_paths"]
    assert all(Path(path).parent == group.parent for path in paths.values()), "moved with the cache"


@pytest.mark.parametrize("damage", ["flip", "cut", "json"])
def test_a_damaged_program_is_compiled_again(copied: Path, damage: str) -> None:
    binary = next(copied.glob("*/glu_forward.cubin"))
    whole = binary.read_bytes()
    if damage == "flip":
        binary.write_bytes(whole[:900] + bytes([whole[900] ^ 1]) + whole[901:])
    elif damage == "cut":
        binary.write_bytes(whole[:-9])
    else:
        binary.with_suffix(".json").write_text("{")
    done = compile_here()
    assert [name.split()[0] for name in done.compiled] == ["glu_forward"]
    [remark] = done.remarks()
    assert remark.endswith("damaged: compiled again (glu_forward)")
    assert binary.read_bytes() == whole
    assert compile_here().remarks() == [], "said once"


def test_another_version_of_triton_is_said_once(copied: Path) -> None:
    old = cache.ProgramCache.read(copied)
    old.remove(next(copied.glob("*/glu_forward.cubin")).parent.name)
    old.write("3.8.0")
    done = compile_here()
    assert done.remarks() == [f"Triton 3.8.0 wrote the cache in {copied}: compiled again"]
    assert compile_here().remarks() == []


def test_a_damaged_list_is_written_again(copied: Path) -> None:
    text = (copied / cache.FILE).read_text()
    (copied / cache.FILE).write_text(text.replace('"version": 1', '"version": 2'))
    assert "damaged" in compile_here().remarks()[0]
    assert (copied / cache.FILE).read_text() == text
    assert compile_here().remarks() == []


def test_without_an_assembler_the_package_is_named(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = SimpleNamespace(ptxas=SimpleNamespace(path="/nowhere/ptxas"))
    monkeypatch.setattr(triton.knobs, "nvidia", absent)
    problem = compile_here().tool
    assert problem is not None
    error = compile.lacking(problem)
    assert isinstance(error, MissingError)
    assert "no assembler (ptxas) for sm_90: /nowhere/ptxas is missing" in error.message
    assert "pip install --force-reinstall triton" in str(error)


def test_without_a_c_compiler_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert tools.find_launcher_problem() is None
    monkeypatch.setenv("CC", "/nowhere/cc")
    problem = tools.find_launcher_problem()
    assert problem is not None and "/nowhere/cc" in problem and "apt-get install gcc" in problem
    (tmp_path / "XYZ").mkdir()
    (tmp_path / "XYZ/cuda_utils.cpython-311-x86_64-linux-gnu.so").touch()
    assert tools.find_launcher_problem() is None, "compiled before"


def test_a_worker_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "COMMAND", ["sh", "-c", "echo out of memory >&2; exit 9"])
    with pytest.raises(LayoutError, match="could not be compiled: out of memory"):
        compile_programs(request())


def test_a_slow_program_is_named() -> None:
    done = Compilation(
        cache="C", programs=2, compiled={"ssd_outputs AB": 4.5, "glu CD": 0.1}, problems={}
    )
    lines = list(render(done, 90))
    assert "  ssd_outputs AB takes 4.5 CPU s" in lines and not any("glu CD" in x for x in lines)
    assert "start the run with TRITON_CACHE_DIR=C" in lines


def test_packed_rows_have_programs_of_their_own() -> None:
    shape = Shape(rows=1, seq_len=64, precision=PRECISIONS["bf16"], device="cuda")
    launches, unknown = list_launches(load_model_config("tiny-hybrid"), [shape])
    assert unknown == []
    packed = {dict(launch.options).get("PACKED") for launch in launches}
    assert {True, False} <= packed
    names = {launch.program.fn.__name__ for launch in launches}
    assert {"ssd_backward_pairs", "short_convolution_backward", "glu_forward"} <= names
    assert torch.get_default_dtype() == torch.float32


def test_messages_and_ops_around_kernels_hide_no_program() -> None:
    """States of earlier ranks, FP8 products, products of experts."""

    def names(model: str, precision: Any, **degrees: int) -> set[tuple[str, bool | None]]:
        layout = Degrees(**degrees)
        shape = Shape(rows=1, seq_len=64, precision=precision, device="cuda", degrees=layout)
        launches, unknown = list_launches(load_model_config(model), [shape])
        assert unknown == []
        return {
            (launch.program.fn.__name__, dict(launch.options).get("WRITE")) for launch in launches
        }

    bf16, fp8 = PRECISIONS["bf16"], PRECISIONS["fp8"]
    assert fp8.fp8 is not None
    scanned = names("tiny-hybrid", bf16, cp=2)
    assert {("ssd_scan_states", False), ("ssd_scan_states", True)} <= scanned
    small = replace(fp8, fp8=replace(fp8.fp8, smallest=16))
    assert ("fp8_quantize_rows", None) in names("tiny-transformer", small, tp=2)
    assert ("routed_rows_combine", None) in names("tiny-moe", bf16, ep=2)


def test_a_gpu_without_kernels_is_misuse() -> None:
    assert (parse_arch("sm_90"), parse_arch("sm_100"), parse_arch("89")) == (90, 100, 89)
    for text in ("sm_75", "gfx942", ""):
        with pytest.raises(MisuseError, match="not a GPU that kernels support"):
            parse_arch(text)


SCRIPT = """
import json
from benchmarks._fake_gpu import FakeGpu
from benchmarks.step_counts import count_step
from headrace.models.accounting.shape import Shape
from headrace.models.accounting.state import Degrees
from headrace.models.compilation import launches, worker
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS

recorder = launches.LaunchRecorder()
record = FakeGpu.program

def program(gpu, function, *arguments, **options):
    named = tuple((name, launches._describe(value)) for name, value in options.items())
    values = tuple(map(launches._describe, arguments))
    recorder.launches[launches.Launch(function, values, named)] = None
    return record(gpu, function, *arguments, **options)

FakeGpu.program = program
config, tokens = load_model_config("tiny-hybrid"), 1024
for boundaries in ([0, 100, 101, 640, tokens], [0, tokens]):
    count_step(config, tokens, boundaries)
shape = Shape(rows=1, seq_len=tokens, precision=PRECISIONS["bf16"], device="cuda")
listed, unknown = launches.list_launches(config, [shape])
programs = [
    sorted([program.entry, program.name] for program in worker.list_programs(list(of), 90))
    for of in (recorder.launches, listed)
]
print(json.dumps([*programs, unknown]))
"""


@pytest.mark.slow
def test_the_programs_are_those_of_the_real_step() -> None:
    """The loop, the engine and its backward pass run on a fake GPU, with all layers."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True,
                         env={**os.environ, "PYTHONPATH": f"{ROOT}/.root:{ROOT}"})  # fmt: skip
    launched, listed, unknown = json.loads(run.stdout.splitlines()[-1])
    assert listed == launched and unknown == [] and len(listed) > 30


@pytest.mark.long
def test_the_programs_are_those_of_a_step_on_two_ranks() -> None:
    """Messages inside ops, ops around kernels (FP8) and grouped products hide no program."""
    port = free_ports()
    command = [sys.executable, str(Path(__file__).with_name("two_ranks.py"))]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/.root:{ROOT}"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(port)], env=environment, stdout=subprocess.PIPE)
        for rank in (0, 1)
    ]
    answers = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    for answer in answers:
        for case, programs in answer.items():
            assert programs["unknown"] == [], case
            assert programs["listed"] == programs["launched"], case
            assert len(programs["listed"]) > 15, case
