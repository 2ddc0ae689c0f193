"""Pipelines: step time beside the simulator's prediction, and the executor's cost on one stage.

    python -m benchmarks.pipeline [--model tiny-hybrid] [--micro-batches 8] [--rounds 5]

First each rank measures its passes alone: CPU time of the forward and the backward pass of each of
its chunks under FSDP2, the least of several. Then all schedules and cuts take steps in turn, and
each line has the median of the rounds' ratios, with their quartiles.

asleep      A pass sleeps for the measured time instead of computing. Executor, schedule and
            messages are those of a run, and 4 sleeping ranks need no 4 cores: the ratio says what
            they add to the simulated step. A sleeping rank wakes up late, which counts too.
computing   The passes compute. Where ranks and other programs share the cores, the simulator's time
            is out of reach. So cores are a resource of the prediction: r ranks that run share the
            cores that other programs left during the step (/proc/stat), at most one each. A step
            takes more CPU time than its passes alone: it gathers weights and sends messages, and
            ranks in company slow each other down. The line names the factor, and the prediction
            has it in every pass: the ratio says if schedule and messages let a core rest. While
            ranks wait, other programs take cores that the prediction then lacks.

The last lines compare the executor on one rank with the plain loop (forward, backward, for each
micro-batch), in CPU time and in turn: with a model, and with an engine that does nothing, which
measures the difference itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.models.parallel.handed import attach_gradients
from headrace.trainer.engines.engine import Engine
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Sums
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.cuts import even_cuts
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.layout.schedules import Kind, Orders, StageAction
from headrace.trainer.layout.simulate import simulate
from headrace.trainer.layout.stages import choose_cuts, list_chunks
from headrace.trainer.loop.execute import execute, forward_pass

from . import _ranks
from .messages import Batch, batches

STAGES, LENGTH, RUNS = (4, 2), 128, 9
OVERRIDES = ("pattern='[mamba, attention] * 8'", "vocab_size=4096")
"""Sixteen layers, and a head that costs as much as several of them."""
SCHEDULES: Sequence[dict[str, Any]] = (
    {},
    {"schedule": "gpipe"},
    {"schedule": "interleaved", "chunks": 2},
)
FEW, PAIRS, IDLE = 2, 60, 400
"""Micro-batches of a step on one stage; pairs of measurements of the executor and the plain loop,
with a model and without."""
Times = Mapping[Kind, Sequence[float]]
"""Times of a forward and a backward pass of each chunk."""


def config_of(model: str) -> ModelConfig:
    return load_model_config(model, OVERRIDES)


@dataclass(frozen=True)
class Piped:
    """An engine of a stage, in one schedule with one choice of cuts."""

    name: str
    engine: Engine
    parallel: Parallel
    times: Times

    def step(self, rows: list[Batch], engine: Any) -> tuple[float, float, float]:
        """Return the time of the passes of a step, on the slowest rank, the CPU seconds of all
        ranks, and those of other programs. Collective."""
        dist.barrier()
        everyone, began, used = busy(), time.perf_counter(), time.process_time()
        execute(self.orders(len(rows)), rows, engine, self.parallel, float(len(rows) * LENGTH))
        dist.barrier()
        taken = time.perf_counter() - began
        ours = torch.tensor(time.process_time() - used, dtype=torch.float64)
        everyone = busy() - everyone
        dist.all_reduce(ours)
        self.engine.discard()
        return taken, float(ours), max(0.0, everyone - float(ours))

    def orders(self, number: int) -> Orders:
        return self.parallel.pipe.orders(number)


def build(config: ModelConfig, rows: list[Batch]) -> list[Piped]:
    """Return an engine for each schedule with even cuts, and with cuts by cost. Collective."""
    result = []
    for words in SCHEDULES:
        layout = LayoutConfig(pp=dist.get_world_size(), **words)
        choices = {
            "even cuts": even_cuts(len(config.layers), layout.all_chunks),
            "cuts by cost": choose_cuts(layout, config, LENGTH),
        }
        for name, cuts in choices.items():
            chosen = LayoutConfig(pp=layout.pp, cuts=cuts, **words)
            built = _ranks.build(config, Fsdp2Config(), chosen, LENGTH, "fp32")
            times = chunk_times(*built, rows[0])
            result.append(Piped(f"{layout.schedule}, {name}", *built, times))
    return result


def chunk_times(engine: Engine, parallel: Parallel, batch: Batch) -> Times:
    """Return the CPU times of the passes of all chunks. Each rank measures its own, one rank after
    the other. Collective."""
    mine: dict[int, tuple[float, float]] = {}
    for stage in range(parallel.pipe.layout.pp):
        dist.barrier()
        if stage == parallel.pipe.stage:
            for chunk in list_chunks(parallel.pipe.layout, stage):
                mine[chunk] = pass_times(engine, parallel, batch, chunk)
    engine.discard()
    everyone: list[Any] = [None] * parallel.world
    dist.all_gather_object(everyone, mine)
    result = {chunk: times for item in everyone for chunk, times in item.items()}
    forward, backward = zip(*(result[chunk] for chunk in sorted(result)), strict=True)
    return {"forward": forward, "backward": backward}


def pass_times(engine: Engine, parallel: Parallel, batch: Batch, chunk: int) -> tuple[float, float]:
    model = engine.objective.model
    shape = (1, LENGTH, model.config.width)
    tensors = model.stream_tensors(chunk) if chunk else 0
    forward, backward = [], []
    for _ in range(RUNS):
        stream = tuple(torch.randn(shape, requires_grad=True) for _ in range(tensors))
        began = time.thread_time()
        sums = forward_pass(engine, batch, parallel, chunk, stream)
        middle = time.thread_time()
        loss = sums.total / LENGTH
        if sums.stream:
            loss = loss + attach_gradients(
                sums.stream, [torch.full(shape, 1e-3) for _ in sums.stream]
            )
        engine.backward(loss, last=False)
        forward.append(middle - began)
        backward.append(time.thread_time() - middle)
    return min(forward), min(backward)


class Asleep:
    """An engine whose passes sleep for the times of their chunks."""

    dtype = torch.float32

    def __init__(self, engine: Engine, times: Times) -> None:
        self.objective = engine.objective
        self.times = times
        self.start = torch.zeros((), requires_grad=True)

    def __call__(
        self,
        tokens: torch.Tensor,
        targets: Any,
        weights: Any,
        documents: Any,
        chunk: int,
        stream: Any,
    ) -> Sums:
        model: Model = self.objective.model
        time.sleep(self.times["forward"][chunk])
        last = chunk == len(model.chunks) - 1
        shape = (*tokens.shape, model.config.width)
        outputs = [torch.zeros(shape)] * (0 if last else model.stream_tensors(chunk + 1))
        total, *stream_grads = _Sleep.apply(
            self.times["backward"][chunk], outputs, *(stream or (self.start,))
        )
        return Sums(total, tokens.new_zeros(len(tokens), dtype=torch.float32), tuple(stream_grads))

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()


class _Sleep(torch.autograd.Function):
    """A loss of 0 and `outputs`, whose backward pass sleeps."""

    @staticmethod
    def forward(
        ctx: Any, seconds: float, outputs: list[torch.Tensor], *stream: torch.Tensor
    ) -> Any:
        ctx.seconds, ctx.gradients = seconds, [torch.zeros_like(item) for item in stream]
        return torch.zeros(()), *(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return None, None, *ctx.gradients


def on_cores(orders: Orders, times: Times, cores: float) -> float:
    """Return the time of a step whose stages share `cores` evenly. With enough cores it is the
    simulator's."""
    last = len(times["forward"]) - 1
    done: set[tuple[Kind, int, int]] = set()
    places, remaining, clock = [0] * len(orders), {}, 0.0
    while True:
        for stage, order in enumerate(orders):
            if stage not in remaining and places[stage] < len(order):
                action = order[places[stage]]
                if _needs(action, last) <= done:
                    remaining[stage] = times[action.kind][action.chunk]
        if not remaining:
            return clock
        rate = min(1.0, cores / len(remaining))
        shortest = min(remaining.values())
        clock += shortest / rate
        for stage in [item for item in remaining if remaining[item] <= shortest]:
            action = orders[stage][places[stage]]
            done.add((action.kind, action.chunk, action.micro))
            places[stage] += 1
            del remaining[stage]
        remaining = {stage: rest - shortest for stage, rest in remaining.items()}


def _needs(action: StageAction, last: int) -> set[tuple[Kind, int, int]]:
    """Return the passes that must have ended before an action."""
    chunk, micro = action.chunk, action.micro
    if action.kind == "forward":
        return {("forward", chunk - 1, micro)} if chunk else set()
    behind: set[tuple[Kind, int, int]] = {("backward", chunk + 1, micro)} if chunk < last else set()
    return {("forward", chunk, micro), *behind}


def busy() -> float:
    """Return the CPU seconds of all programs since the machine started; 0 where it is not Linux."""
    if sys.platform != "linux":
        return 0.0
    user, nice, system, _, _, *more = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return sum(map(int, (user, nice, system, *more))) / os.sysconf("SC_CLK_TCK")


def step_times(model: str, number: int, rounds: int) -> list[str]:
    """Return the lines of all schedules and cuts on these ranks."""
    cores, config = len(os.sched_getaffinity(0)), config_of(model)
    rows = batches(number, config.vocab_size, slice(None), 0, LENGTH)
    piped = build(config, rows)
    asleep: dict[str, list[float]] = {item.name: [] for item in piped}
    computing: dict[str, list[tuple[float, float, float]]] = {item.name: [] for item in piped}
    for round_ in range(rounds + 1):
        for pipeline in piped:
            pause, _, _ = pipeline.step(rows, Asleep(pipeline.engine, pipeline.times))
            taken, ours, other_seconds = pipeline.step(rows, pipeline.engine)
            if round_:  # the first round warms up
                work = ours / (number * sum(map(sum, pipeline.times.values())))
                free_cores = cores - other_seconds / taken
                predicted = work * on_cores(pipeline.orders(number), pipeline.times, free_cores)
                asleep[pipeline.name].append(pause)
                computing[pipeline.name].append((taken, predicted, work))
    ranks = dist.get_world_size()
    lines = []
    for pipeline in piped:
        free = simulate(pipeline.orders(number), pipeline.times).time
        ratios = [taken / free for taken in asleep[pipeline.name]]
        lines.append(
            f"asleep, {ranks} stages, {pipeline.name}: {spread(ratios)}x the simulated time "
            f"({median(asleep[pipeline.name]):.3f} s and {free:.3f} s, {number} micro-batches)"
        )
    for pipeline in piped:
        taken, predicted, work = map(median, zip(*computing[pipeline.name], strict=True))
        ratios = [a / b for a, b, _ in computing[pipeline.name]]
        lines.append(
            f"computing, {ranks} stages on {cores} shared cores, {pipeline.name}: "
            f"{spread(ratios)}x the time simulated with these cores ({taken:.3f} s and "
            f"{predicted:.3f} s); the passes take {work:.2f}x the CPU time that they take alone"
        )
    return lines


def spread(ratios: Sequence[float], digits: int = 2) -> str:
    """Format the median, and the quartiles."""
    low, middle, high = quantiles(ratios, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


class Idle:
    """An engine that does nothing."""

    dtype = torch.float32

    def __init__(self, engine: Engine) -> None:
        self.objective = engine.objective
        self.sums = Sums(torch.zeros(()), torch.zeros(1))

    def __call__(self, *inputs: Any) -> Sums:
        return self.sums

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        pass


def overhead(model: str) -> list[str]:
    """Return the lines that compare the executor with the plain loop, on one rank."""
    config, number = config_of(model), FEW
    engine, parallel = _ranks.build(config, Fsdp2Config(), LayoutConfig(), LENGTH, "fp32")
    rows = batches(number, config.vocab_size, slice(None), 0, LENGTH)

    def plain(engine: Any) -> None:
        losses = []
        for place, batch in enumerate(rows):
            documents = Documents.build(batch.cu_seqlens, (1, LENGTH))
            sums = engine(*batch[:3], documents)
            losses.append(sums.rows)
            engine.backward(sums.total / 7.0, last=place == number - 1)

    def executed(engine: Any) -> None:
        execute(parallel.pipe.orders(number), rows, engine, parallel, 7.0)

    def seconds(act: Callable[[Any], None], engine: Any) -> float:
        began = time.process_time()
        act(engine)
        return time.process_time() - began

    def pairs(engine: Any, count: int, end: Callable[[], None]) -> list[tuple[float, float]]:
        """Return CPU seconds of the executor and of the plain loop; each comes first in turn."""
        result = []
        for pair in range(count):
            taken = {}
            for act in (executed, plain)[:: (-1) ** pair]:
                taken[act] = seconds(act, engine)
                end()
            result.append((taken[executed], taken[plain]))
        return result[count // 10 :]  # the first warm up

    gc.disable()  # a collection would fall into one of them
    idle = pairs(Idle(engine), IDLE, lambda: None)
    executor_idle, plain_idle = (min(column) for column in zip(*idle, strict=True))
    more = (executor_idle - plain_idle) / number
    times = pairs(engine, PAIRS, engine.discard)
    taken = median(plain for _, plain in times) / number
    return [
        f"executor on one stage: {spread([a / b for a, b in times], 3)}x the CPU time of the plain "
        f"loop, in {len(times)} pairs; the limit is 1.01",
        f"executor on one stage, without a model: {1e6 * more:.1f} µs of CPU more for a "
        f"micro-batch, {more / taken:.3%} of a micro-batch of {LENGTH} tokens "
        f"({1e3 * taken:.1f} ms); the limit is 1%",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-hybrid")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model, number = options.model, options.micro_batches
    for ranks in STAGES:
        for line in _ranks.run(ranks, step_times, model, number, options.rounds):
            print(f"pipeline {line}", flush=True)
    for line in _ranks.run(1, overhead, model):
        print(line)


if __name__ == "__main__":
    main()
