"""`trainer run --mixture` itself on a device: commands as a person gives them.

    python -m benchmarks.long.gpu_suite.runs [--dry] --bundle BUNDLE --work WORK NAME …

Each tiny model trains for six steps, whose losses lie beside those of a CPU in fp32. hybrid-1b is
stopped, resumed into another phase, and audited. The bundle has the data and the losses.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .install import ROOT

if TYPE_CHECKING:
    from headrace.models.config.config import ModelConfig
    from headrace.models.config.options.precision import Precision

PROGRAMS = {"trainer": "headrace.trainer.cli", "mixtures": "headrace.mixtures.cli"}
STOPPED = 85
"""Exit code of a run that was saved and stopped early."""
STOP_AFTER = 4
LOSSES = "losses.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, and how far its losses may be from those of the CPU."""

    name: str
    model: str
    mixture: str = "tiny"
    precision: str = "fp32"
    engine: str = "fsdp2"
    words: tuple[str, ...] = ()
    tokens: int = 1024
    """Tokens of a micro-batch."""
    lengths: tuple[int, ...] = (256,)
    """Tokens of a row, in each phase."""
    bound: float = 2e-4
    """Largest relative difference of a step's loss."""
    model_words: tuple[str, ...] = field(default=())
    """Overrides of the model."""

    @property
    def title(self) -> str:
        """Begins the line of the result."""
        return f"run of {self.name}"

    def load_model(self) -> ModelConfig:
        from headrace.models.config.config import load_model_config

        return load_model_config(self.model, list(self.model_words))

    def load_precision(self) -> Precision:
        from headrace.models.config.options.precision import PRECISIONS

        precision = PRECISIONS[self.precision]
        if precision.fp8 is None:
            return precision
        return replace(precision, fp8=replace(precision.fp8, smallest=SMALLEST))

    def command(self, data: Path, out: Path, device: str) -> list[str]:
        return [
            *("trainer", "run", "--mixture", str(data / f"{self.mixture}.yaml")),
            f"mixture.sources.code.data={data / MIXTURES[self.mixture][2]}",
            *("--model", self.model, "--out", str(out), "--processes", "1"),
            *(f"device={device}", f"precision={self.precision}"),
            *(f"micro_batch_tokens={self.tokens}", f"engine.kind={self.engine}"),
            *(f"model.{word}" for word in self.model_words),
            *self.words,
        ]


SMALLEST = 64
"""Smallest width of a product in FP8: the tiny models' are below the usual one."""
TINY = tuple(sorted(file.stem for file in (ROOT / "configs" / "models").glob("tiny-*.yaml")))
RUNS = (
    *(Run(name=f"{model} in fp32", model=model) for model in TINY),
    Run(name="grouped experts", model="tiny-moe", precision="bf16", bound=2e-2),
    Run(
        name="fp8",
        model="tiny-hybrid",
        precision="fp8",
        words=(f"fp8.smallest={SMALLEST}",),
        bound=5e-2,
    ),
    Run(
        name="DeepSpeed ZeRO-1",
        model="tiny-transformer",
        engine="deepspeed",
        words=("engine.zero=1", "engine.extra={steps_per_print: 1000000}"),  # DeepSpeed itself
    ),
)
HYBRID = Run(
    name="hybrid-1b",
    model="hybrid-1b",
    mixture="bpe",
    precision="bf16",
    tokens=16_384,
    lengths=(16_384, 8192),
    words=("checkpoints.keep_last=1",),
)
DRY_HYBRID = Run(
    name="hybrid-1b",
    model="tiny-hybrid",
    mixture="bpe-dry",
    words=("checkpoints.keep_last=1",),
    model_words=("vocab_size=32000",),
    tokens=128,
)
"""The same commands in a dry run."""
MIXTURES = {
    "tiny": (256, 1024, "code-byte"),
    "bpe": (16_384, 16_384, "code-bpe"),
    "bpe-dry": (128, 128, "code-bpe"),
}
"""Tokens of a row and of a step, and data, of each mixture: four steps, then two of another
phase."""


def write_mixtures(data: Path) -> None:
    """Write the mixtures beside their data."""
    for name, (seq_len, batch, source) in MIXTURES.items():
        second = f"\n    seq_len: {seq_len // 2}" if name == "bpe" else ""
        (data / f"{name}.yaml").write_text(
            f"""seed: 7
sources:
  code: {{data: {source}}}
phases:
  first:
    tokens: {4 * batch}
    seq_len: {seq_len}
    batch: {batch}
    weights: {{code: 1}}
    lr: {{warmup: {2 * batch}}}
  second:
    tokens: {2 * batch}{second}
    weights: {{first: 0.5, code: 0.5}}
    lr: {{peak: 0.75, warmup: {batch}, shape: cosine, end: 0.1}}
"""
        )


def call(words: Sequence[str], folder: Path, expected: int = 0) -> float:
    """Run a command of headrace in a folder; its output goes into a log there. Return its seconds,
    raise a RuntimeError with the log's end if it ends otherwise than expected."""
    began = time.monotonic()
    command = [sys.executable, "-m", PROGRAMS[words[0]], *words[1:]]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("a+") as log:
        print(f"$ {shlex.join(words)}", file=log, flush=True)
        start = log.tell()
        done = subprocess.run(command, cwd=folder, stdout=log, stderr=log)
        log.seek(start)
        text = log.read()
    if done.returncode != expected:
        last = " / ".join(text.strip().splitlines()[-6:])
        raise RuntimeError(f"`{shlex.join(words[:2])}` ended with {done.returncode}: {last}"[-900:])
    return time.monotonic() - began


def read_steps(folder: Path) -> list[dict[str, float]]:
    """Read the metrics of a run's steps."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def train(run: Run, data: Path, folder: Path, device: str) -> tuple[list[float], float]:
    """Return the losses of a run, and its seconds."""
    seconds = call(run.command(data, folder / "run", device), folder)
    return [step["loss"] for step in read_steps(folder / "run")], seconds


def measure_losses(data: Path, folder: Path) -> dict[str, list[float]]:
    """Return the losses of each tiny model on this machine's CPU, in fp32."""
    models = dict.fromkeys(run.model for run in RUNS)
    return {
        model: train(Run(name=model, model=model), data, folder / model, "cpu")[0]
        for model in models
    }


def compare(run: Run, bundle: Path, folder: Path, dry: bool) -> str:
    """Train beside the losses of the CPU, and return a line about the two."""
    expected = json.loads((bundle / LOSSES).read_text())[run.model]
    if dry and run.precision == "fp8":  # no CPU computes it
        run = Run(name=run.name, model=run.model)
    losses, seconds = train(run, bundle / "data", folder, "cpu" if dry else "cuda")
    if len(losses) != len(expected):
        raise RuntimeError(f"{len(losses)} steps instead of {len(expected)}")
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    error = max(errors) if all(value == value for value in errors) else float("nan")
    text = (
        f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps, at most {error:.1e} "
        f"beside the CPU's (bound {run.bound:g}), {seconds:.0f} s"
    )
    return text if error <= run.bound else f"WRONG: {text}"


def train_hybrid(bundle: Path, folder: Path, dry: bool) -> Iterator[str]:
    """Stop hybrid-1b, resume it into another phase, and audit its data; yield a line for each."""
    run, device = (DRY_HYBRID, "cpu") if dry else (HYBRID, "cuda")
    words = run.command(bundle / "data", folder / "run", device)
    seconds = call([*words, "--stop-after", str(STOP_AFTER)], folder, STOPPED)
    yield f"saved after {STOP_AFTER} steps, {seconds:.0f} s with compilation and attestation"
    seconds = call(["trainer", "resume", str(folder / "run")], folder)
    steps = read_steps(folder / "run")
    losses = ", ".join(f"{step['loss']:.3f}" for step in steps)
    yield f"resumed into another phase, {seconds:.0f} s: losses {losses}"
    if len(steps) != 6 or not steps[-1]["loss"] < steps[0]["loss"]:
        raise RuntimeError(f"WRONG: {len(steps)} steps, whose loss should fall")
    seconds = call(["mixtures", "audit", str(folder / "run"), "--step", str(STOP_AFTER)], folder)
    rate = max(step["tokens_per_second"] for step in steps[1:])
    attested = [line for line in read_events(folder / "run") if "attested" in line]
    yield f"audited, {seconds:.0f} s; best step {rate:,.0f} tokens/s; {' '.join(attested[:1])}"


def read_events(folder: Path) -> list[str]:
    """Return what a run's events say."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [str(json.loads(line).get("what", "")) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    bundle, failed = options.bundle.resolve(), 0
    if HYBRID.title not in options.names:
        os.nice(10)  # it takes longest, and the others run beside it
    by_title = {run.title: run for run in RUNS}
    for name in options.names:
        folder = options.work.resolve() / f"{name.replace(' ', '-')}-{os.getpid()}"
        done: list[str] = []
        try:
            if name == HYBRID.title:
                for text in train_hybrid(bundle, folder, options.dry):
                    done.append(text)
                    print(f"  {text}", flush=True)
            else:
                done.append(compare(by_title[name], bundle, folder, options.dry))
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            done.insert(0, f"failed: {' '.join(str(error).split())}")
        shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
        failed += done[0].startswith(("failed", "WRONG"))
        print(f"{name}: {'; '.join(done)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
