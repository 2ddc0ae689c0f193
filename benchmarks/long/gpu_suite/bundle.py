"""What travels to the device, made by one command on a machine without a GPU.

    programs.tar.xz    programs of all parts, compiled by this machine's Triton
    wheels/            what `trainer run` imports and the device's Python has not
    data/              a corpus as bytes and as BPE, and the mixtures of the runs
    losses.json        losses of the tiny models on this machine's CPU, in fp32
    predictions.json   what `trainer plan` says of the steps
    manifest.json      commit, versions, sizes

Programs are compiled into a cache that stays: a second bundle compiles what has changed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from .install import MANIFEST, PROGRAMS, ROOT, WHEELS
from .runs import LOSSES, measure_losses, write_mixtures
from .summary import PREDICTIONS

PACKAGES = (
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("deepspeed", "hjson"),
)
"""What a run imports beyond torch, Triton, numpy, PyArrow, PyYAML, click, Jinja2, tokenizers,
safetensors, TensorBoard and what DeepSpeed takes of them."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
TAGS = ("py3-none-any", "py2.py3-none-any")
"""Tags of wheels for every machine."""
LIMIT = 48 * 2**20
"""Bytes of a bundle at most: with a checkout they travel as 64 MiB."""
VOCABULARY = 32_000


def make_bundle(bundle: Path, cache: Path, python: str, only: Sequence[str]) -> int:
    """Make the parts of a bundle, or some of them. Return 1 if something is wrong with it."""
    makers: dict[str, Callable[[], None]] = {
        "wheels": lambda: fetch_wheels(bundle / WHEELS, python),
        "data": lambda: write_data(bundle / "data"),
        "predictions": lambda: write_predictions(bundle / PREDICTIONS),
        "losses": lambda: write_losses(bundle),
        "programs": lambda: compile_programs(bundle / PROGRAMS, cache),
    }
    bundle.mkdir(parents=True, exist_ok=True)
    for name, make in makers.items():
        if not only or name in only:
            began = time.monotonic()
            make()
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    write_manifest(bundle)
    sizes = {
        part.name: sum(file.stat().st_size for file in [part, *part.rglob("*")] if file.is_file())
        for part in sorted(bundle.iterdir())
    }
    for name, size in sizes.items():
        print(f"  {name:20} {size / 2**20:6.2f} MiB")
    total = sum(sizes.values())
    print(f"{bundle}: {total / 2**20:.1f} MiB of {LIMIT / 2**20:.0f}")
    if total > LIMIT:
        print("the bundle is too large to travel", file=sys.stderr)
    return int(total > LIMIT)


def fetch_wheels(folder: Path, python: str) -> None:
    """Fetch the wheels of the installed versions for the Python of the device."""
    shutil.rmtree(folder, ignore_errors=True)
    tag = f"cp{python.replace('.', '')}"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    interpreter = ["--python-version", python, "--implementation", "cp", *platforms]
    for package in PACKAGES:
        pinned = f"{package}=={importlib.metadata.version(package)}"
        download = [*pip, "download", "--no-deps", "--only-binary=:all:", *interpreter]
        done = subprocess.run([*download, "-d", str(folder), pinned], capture_output=True)
        if done.returncode:  # a source alone: it must need no compiler
            build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), pinned]
            environment = {**os.environ, "DS_BUILD_OPS": "0"}
            subprocess.run(build, env=environment, check=True, stdout=subprocess.DEVNULL)
    for wheel in folder.glob("*.whl"):
        if not wheel.stem.endswith(TAGS) and f"-{tag}-{tag}-" not in wheel.name:
            raise ValueError(f"{wheel.name} is not for {tag}")


def write_data(folder: Path) -> None:
    """Tokenize modules of the standard library as bytes and as BPE."""
    from headrace.trainer.guide.demo import write_code

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plain = ("--input-format", "text")
    with tempfile.TemporaryDirectory() as corpus:
        write_code(Path(corpus) / "code")
        files = f"{corpus}/code/*.py"
        size = ("--vocab-size", str(VOCABULARY))
        tokenize("train", files, *size, "--out", f"{corpus}/bpe.json", *plain)
        for tokenizer, name in ((f"{corpus}/bpe.json", "code-bpe"), ("byte", "code-byte")):
            tokenize("build", files, "--tokenizer", tokenizer, "--out", str(folder / name), *plain)
    write_mixtures(folder)


def tokenize(*words: str) -> None:
    command = [sys.executable, "-m", "headrace.tokenize.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`tokenize {shlex.join(words)}`: {done.stderr.strip()[-500:]}")


def write_predictions(file: Path) -> None:
    """Ask the planner about the steps whose rows are one document."""
    from benchmarks.long._gpu_lines import predictable
    from benchmarks.long._gpu_predictions import predict

    predictions = {line.name: predict(line) for line in predictable()}
    file.write_text(json.dumps(predictions, indent=1))
    for name, predicted in predictions.items():
        print(f"  {name}: {predicted}", flush=True)


def write_losses(bundle: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses = measure_losses(bundle / "data", Path(folder))
    (bundle / LOSSES).write_text(json.dumps(losses, indent=1))


def compile_programs(out: Path, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    words = ("--cache", str(cache), "--out", str(out))
    command = [sys.executable, "-m", f"{__package__}.programs", *words]
    subprocess.run(command, check=True)


def write_manifest(bundle: Path) -> None:
    git = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    manifest = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": git.stdout.strip(),
        "triton": importlib.metadata.version("triton"),
        "torch": importlib.metadata.version("torch"),
    }
    (bundle / MANIFEST).write_text(json.dumps(manifest, indent=1))
