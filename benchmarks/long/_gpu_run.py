"""Measurement of a line of gpu_step.py: a run's process, engine and loop on one GPU."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._gpu_models import WIDE, load_wide, with_kernels
from benchmarks._synthetic_run import plan_rows, train
from headrace.models.config.options.names import Backend
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.config.options.recompute import expand_rules
from headrace.models.model.model import initial_weights
from headrace.trainer.engines.engine import Engine, load_weights
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.layout.groups import Parallel, create_groups
from headrace.trainer.loop.hooks.hook import Hook, StepRecord
from headrace.trainer.record.speed import Speed, count_speed, device_peak
from headrace.trainer.run.config import RunConfig
from headrace.trainer.run.job import Job
from headrace.trainer.run.process import (
    build_engine,
    build_loop_options,
    join_group,
    order_attention,
)

from ._gpu_lines import Line, Sizes, lines
from ._gpu_profile import KINDS, Shares, Tracer

TIMEOUT = timedelta(minutes=10)


def make_job(line: Line, sizes: Sizes) -> Job:
    """Return a line's run, with the defaults of a run's configuration for all that no line sets."""
    model = with_kernels(sizes.model(line.model), line.kernels)
    backend: Backend = "aot_eager" if line.compiled and sizes.dry else "inductor"
    run = RunConfig(
        precision=line.precision,
        fp8=PRECISIONS[line.precision].fp8,
        processes=1,
        device=sizes.device,
        micro_batch_tokens=sizes.row_tokens(line) * line.rows,
        recompute=line.recompute,
        engine=Fsdp2Config(compile=line.compiled, compile_backend=backend),
    )
    plan = plan_rows(
        model.vocab_size,
        sizes.timed + sizes.traced,
        sizes.row_tokens(line),
        line.micro_batches * line.rows,
    )
    return Job(folder=RunFolder("gpu_step"), run=run, model=model, plan=plan)


@cache
def join(device: Literal["cpu", "cuda"]) -> Parallel:
    """Join a group of one rank; all lines share it."""
    job = make_job(lines()[0], Sizes(dry=device == "cpu"))
    join_group(job, TIMEOUT)
    return create_groups(job.run.layout, device, TIMEOUT)


@cache
def weights_of(model: str, sizes: Sizes, folder: Path | None) -> Mapping[str, Tensor]:
    """Return the initial weights of a model: from its file in `folder`, or drawn."""
    file = folder and folder / f"{model}.safetensors"
    if file and file.exists():
        from safetensors.torch import load_file

        weights = load_file(file)
    elif model in WIDE and not sizes.dry:
        weights = dict(initial_weights(load_wide(model, kinds=True), 0))
    else:
        weights = dict(initial_weights(sizes.model(model), 0))
    if model in WIDE and not sizes.dry:
        return Repeated(weights, model)
    return weights


def draw_weights(model: str, sizes: Sizes, folder: Path) -> None:
    """Draw the initial weights of a model into its file."""
    from safetensors.torch import save_file

    weights = weights_of(model, sizes, None)
    weights = weights.weights if isinstance(weights, Repeated) else weights
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{model}.unfinished"
    save_file({name: weight.contiguous() for name, weight in weights.items()}, unfinished)
    unfinished.rename(folder / f"{model}.safetensors")


class Repeated(Mapping[str, Tensor]):
    """Weights of one layer of each kind, for all layers: they are drawn in seconds, and a step
    takes as long."""

    def __init__(self, weights: Mapping[str, Tensor], model: str) -> None:
        kinds = load_wide(model, kinds=True).layers
        self.weights = weights
        self.blocks = [kinds.index(layer) for layer in load_wide(model).layers]

    def _source(self, name: str) -> str:
        return re.sub(r"(?<=^blocks\.)\d+", lambda number: str(self.blocks[int(number[0])]), name)

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self._source(name)]

    def __iter__(self) -> Iterator[str]:
        for name in self.weights:
            if not name.startswith("blocks."):
                yield name
        for block, source in enumerate(self.blocks):
            prefix = f"blocks.{source}."
            for name in self.weights:
                if name.startswith(prefix):
                    yield f"blocks.{block}.{name.removeprefix(prefix)}"

    def __len__(self) -> int:
        return sum(1 for _ in self)


def build(line: Line, sizes: Sizes, folder: Path | None = None) -> Engine:
    """Return a line's engine with the initial weights of its model (`weights_of`)."""
    engine = build_engine(make_job(line, sizes), join(sizes.device))
    load_weights(engine, weights_of(line.model, sizes, folder))
    return engine


@dataclass(frozen=True)
class Measured:
    """Result of a line."""

    tokens: int
    """Tokens of a step."""
    seconds: float
    """Median of the measured steps."""
    first: float
    """Seconds of the first step, which compiles."""
    allocated: int
    reserved: int
    """Peak memory of the measured steps in bytes."""
    shares: Shares | None = None

    def text(self, speed: Speed, length: int) -> str:
        rate = self.tokens / self.seconds
        used = [
            f"{name} {'—' if value is None else format(value, '.3f')}"
            for name, value in (("MFU", speed.mfu(length, rate)), ("HFU", speed.hfu(length, rate)))
        ]
        words = [
            f"{rate:,.{0 if rate >= 10 else 3}f} tokens/s",
            *used,
            f"{1e3 * self.seconds:.1f} ms a step",
            f"memory {self.allocated / 2**30:.1f} GiB allocated, "
            f"{self.reserved / 2**30:.1f} GiB reserved",
            f"first step {self.first:.1f} s",
        ]
        if self.shares is not None:
            parts = [f"{kind} {self.shares.share(kind):.1%}" for kind in KINDS]
            idle = max(0.0, 1 - self.shares.busy / self.seconds)
            words += [f"{self.shares.launches:,.0f} launches a step", *parts, f"idle {idle:.1%}"]
        return ", ".join(words)


class Seconds(Hook):
    """Keeps the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step_done(self, record: StepRecord) -> None:
        self.seconds.append(record.seconds)


class Memory:
    """Peak memory between two moments; nothing on the CPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.allocated = self.reserved = 0

    def begin(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def end(self) -> None:
        if self.cuda:
            self.allocated = torch.cuda.max_memory_allocated()
            self.reserved = torch.cuda.max_memory_reserved()


def speed(line: Line, sizes: Sizes) -> Speed:
    """Count FLOPs: products with weights, and the pairs of tokens that attention computes."""
    config = sizes.model(line.model)
    return count_speed(
        config,
        [sizes.pairs(line)],
        rules=expand_rules(line.recompute, len(config.layers)),
        peak=device_peak(sizes.device),
        fp8=PRECISIONS[line.precision].fp8,
    )


def measure(line: Line, sizes: Sizes, trace: Path, weights: Path | None = None) -> str:
    """Return the text of a line; its traced steps go into a file."""
    job = make_job(line, sizes)
    engine = build(line, sizes, weights)
    memory = Memory(sizes.device)
    steps = range(sizes.timed, sizes.timed + sizes.traced)
    tracer = Tracer(steps, sizes.device == "cuda", trace)

    class Turns(Hook):
        def step_begins(self, step: int) -> None:
            if step == sizes.warm:
                memory.begin()
            if step == sizes.timed:
                memory.end()
            tracer.begin(step)

    recorder = Seconds()
    parallel = join(sizes.device)
    with order_attention(job.run):
        train(
            engine,
            parallel,
            job.model.vocab_size,
            [Turns(), recorder],
            steps=steps.stop,
            tokens=sizes.row_tokens(line),
            boundaries=lambda row: sizes.boundaries(line, row),
            micro_batches=line.micro_batches,
            rows=line.rows,
            loop_options=build_loop_options(job, parallel),
        )
    measured = Measured(
        tokens=sizes.row_tokens(line) * line.rows * line.micro_batches,
        seconds=median(recorder.seconds[sizes.warm : sizes.timed]),
        first=recorder.seconds[0],
        allocated=memory.allocated,
        reserved=memory.reserved,
        shares=tracer.result(),
    )
    return measured.text(speed(line, sizes), sizes.pairs(line))


def timed_steps(step: Callable[[], object], sizes: Sizes) -> Measured:
    """Measure a peer: `step` takes an optimizer step and reads its loss."""
    memory, seconds = Memory(sizes.device), []
    for number in range(sizes.timed):
        if number == sizes.warm:
            memory.begin()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    memory.end()
    return Measured(
        tokens=sizes.tokens,
        seconds=median(seconds[sizes.warm :]),
        first=seconds[0],
        allocated=memory.allocated,
        reserved=memory.reserved,
    )


def clear(device: str) -> None:
    """Free what a line held."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
