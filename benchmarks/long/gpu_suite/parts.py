"""Parts of the suite in the order of their worth, with the seconds of each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.long._tasks import Task

from .runs import HYBRID, RUNS

LONG = Path(__file__).parents[1]
STEP, KERNELS, TASK = (str(LONG / name) for name in ("gpu_step.py", "kernels.py", "_gpu_task.py"))
SLOWER = 6
"""Factor of the limits of tasks in a dry run, whose interpreter and cores are slow."""
DRY_KERNELS = ("glu", "toeplitz")
"""Kernels of a dry run's times and limits: the others take the same way."""
WEIGHTS = 32 * 2**30
"""Bytes of all weights in fp32, and some."""
MEMCHECK = ("short_convolution", "toeplitz", "modal", "ssd")
"""Kernels that memcheck watches: those with the most arithmetic of addresses."""


@dataclass(frozen=True)
class Settings:
    bundle: Path
    work: Path
    out: Path
    dry: bool


@dataclass(frozen=True)
class Part:
    name: str
    seconds: int
    tasks: Callable[[Settings], Iterator[Task]]

    def list_tasks(self, settings: Settings) -> list[Task]:
        slower = SLOWER if settings.dry else 1
        return [replace(task, limit=slower * task.limit) for task in self.tasks(settings)]


def _module(name: str, *words: str) -> tuple[str, ...]:
    return ("-m", f"{__package__}.{name}", *words)


def _task(settings: Settings, name: str, *words: str, limit: float = 60) -> Task:
    return Task(name, (TASK, *("--dry",) * settings.dry, *words), limit)


def attest(settings: Settings) -> Iterator[Task]:
    """All kernels and next programs beside their twins; weights are drawn at the same time."""
    from benchmarks._gpu_models import MODELS, WIDE

    seconds = 90 * (SLOWER if settings.dry else 1)
    flags = ("--seconds", str(seconds), *["--dry"] * settings.dry)
    words = _module("attest", "--out", str(settings.out), *flags)
    yield Task("attestation", words, 110, concurrent=True)
    yield Task("attestation of next programs", (*words, "--next"), 110, concurrent=True)
    for model in (*MODELS, *WIDE):
        task = _task(settings, f"weights of {model}", "weights", model, str(_weights(settings)))
        yield replace(task, limit=120, concurrent=True)


def _weights(settings: Settings) -> Path:
    """Return the folder of the weights: in memory, where that has room for them."""
    memory = Path("/dev/shm")
    if not settings.dry and memory.is_dir() and shutil.disk_usage(memory).free > WEIGHTS:
        return memory / "headrace-suite"
    return settings.work / "weights"


def train(settings: Settings) -> Iterator[Task]:
    """`trainer run`: hybrid-1b, and beside it every tiny model."""
    places = ("--bundle", str(settings.bundle), "--work", str(settings.work / "runs"))
    for run in (HYBRID, *RUNS):
        words = _module("runs", *places, *["--dry"] * settings.dry)
        limit = 200 if run is HYBRID else 120
        yield Task(run.title, words, limit, items=(run.title,), concurrent=True)


def steps(settings: Settings) -> Iterator[Task]:
    """Three models packed and not, beside a Transformer by hand; FP8; compiled."""
    from benchmarks.long._gpu_lines import Line, lines
    from benchmarks.long._gpu_peers import BY_HAND

    yield _task(settings, "rates", "rates")
    plain = [line for line in lines() if line == Line(model=line.model, packed=line.packed)]
    chosen = [line for line in plain if line in lines()[:6]]
    fast = [line for line in lines() if line.precision != "bf16" or line.compiled]
    yield _steps(settings, "steps", [line.name for line in chosen], 45)
    yield _steps(settings, "peer", [BY_HAND], 60)
    for line in fast:  # each a process: its compiler may fail, or not end
        yield _steps(settings, line.name, [line.name], 50)


def _steps(settings: Settings, name: str, names: list[str], limit: float) -> Task:
    words = ("--weights", str(_weights(settings)), "--traces", str(settings.out / "traces"))
    command = (STEP, *("--dry",) * settings.dry, *words)
    return Task(name, command, limit, items=tuple(names))


def wide(settings: Settings) -> Iterator[Task]:
    """Layers of 7B models, as many as fit."""
    from benchmarks._gpu_models import WIDE
    from benchmarks.long._gpu_lines import lines

    for line in lines():
        if line.model in WIDE:
            yield _steps(settings, line.name, [line.name], 50)


def host(settings: Settings) -> Iterator[Task]:
    """The host alone: steps so short that the device waits for it."""
    from benchmarks.long._gpu_lines import HOST_TOKENS, lines

    names = [line.name for line in lines() if line.tokens == HOST_TOKENS]
    yield _steps(settings, "host", names, 25)


def kernels(settings: Settings) -> Iterator[Task]:
    """Each kernel beside its peers."""
    yield from _kernels(settings, "times", 25)


def _kernels(settings: Settings, part: str, limit: float) -> Iterator[Task]:
    from benchmarks.long import kernels

    names = DRY_KERNELS if settings.dry else ()
    yield from kernels.tasks([part], names, settings.dry, limit)


def limits(settings: Settings) -> Iterator[Task]:
    """More than 2^31 elements, CUDA graphs, memcheck; a whole step beside plain torch; products."""
    yield from _kernels(settings, "limits", 40)
    for kernel in DRY_KERNELS[:1] if settings.dry else MEMCHECK:
        yield _task(settings, f"memcheck {kernel}", "sanitizer", "memcheck", kernel, limit=40)
    yield _task(settings, "smoke", "smoke", limit=60)
    yield _task(settings, "attention", "attention")
    yield _task(settings, "fp8 products", "fp8")


PARTS = (
    Part("attest", 110, attest),
    Part("train", 190, train),
    Part("steps", 240, steps),
    Part("wide", 60, wide),
    Part("host", 40, host),
    Part("kernels", 90, kernels),
    Part("limits", 90, limits),
)


def describe() -> list[str]:
    """Return a line for each part."""
    lines = [
        f"{part.name:9} {part.seconds:4} s  {(part.tasks.__doc__ or '').strip()}" for part in PARTS
    ]
    return [*lines, f"{'all':9} {sum(part.seconds for part in PARTS):4} s"]
