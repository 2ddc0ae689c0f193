"""Work of one process of kernels.py: check a kernel, time it, or time a model."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from benchmarks._gpu_models import MODELS, TINY, with_kernels
from headrace.models.attestation.cases import all_cases
from headrace.models.attestation.cases.case import Draw
from headrace.models.attestation.cases.compare import evaluate
from headrace.models.attestation.plan import AttestationPlan
from headrace.models.attestation.worker import run_subject
from headrace.models.config.options.names import Backend, Kernel
from headrace.models.kernels import NEXT, choice
from headrace.models.layers.attention.order import Implementation, attention_order
from headrace.models.model.model import Model
from headrace.models.transforms.compilation import compile_blocks

from ._kernel_limits import beyond_limits
from ._kernel_peers import Size, Timed, timed

NEXT_PROGRAMS = "its next programs"
"""The peer that would take a kernel's place: faster by its binaries, unconfirmed on a device."""
LENGTHS = {False: (1 << 14, 1 << 15), True: (48,)}
"""Lengths of a model's rows, by whether the run is dry."""


def measured(part: str, name: str, dtype: str, dry: bool) -> int:
    warnings.simplefilter("ignore")
    torch._functorch.config.donated_buffer = False  # backward passes are timed repeatedly
    if part in ("checks", "limits"):
        wrong = 0
        for line in check(name, dtype, dry) if part == "checks" else beyond_limits(name, dry):
            print(f"{name}: {line}", flush=True)
            wrong += 1
        return 1 if wrong else 0
    if part == "small":
        return run_small(name, dtype, dry)
    clock = Clock(dry)
    if part == "models":
        return compare_models(int(name), clock)
    size = Size("cpu", torch.float32, 40, 32)
    if not dry:
        size = Size("cuda", torch.bfloat16, 1 << 17, 4096)
    for key, make in timed(size).items():
        if key.split()[0] == name:
            backward(make(), clock) if part == "backward" else report(name, make(), clock)
    return 0


def backward(task: Timed, clock: Clock) -> None:
    """Run our backward pass once, between the calls that a profiler begins and ends with."""
    outputs = task.ours(**task.inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [x for x in task.inputs.values() if x.requires_grad]
    above = [torch.randn_like(y) for y in outputs]
    torch.autograd.grad(outputs, leaves, above, retain_graph=True)  # compiles
    if not clock.dry:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    torch.autograd.grad(outputs, leaves, above)
    if not clock.dry:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    print(f"{task.name}: a backward pass", flush=True)


def run_small(kernel: str, dtype: str, dry: bool) -> int:
    """Run every option of a kernel once at small sizes, for a tool that watches its accesses."""
    cases = [case for case in all_cases() if case.kernel == kernel]
    for case in cases[: 1 if dry else None]:
        draw = Draw(getattr(torch, dtype), "cpu" if dry else "cuda", 1)
        evaluate(case.run, case.make(draw, case.tiny), draw, Tensor.clone)
    print(f"{kernel}: ran {len(cases)} options", flush=True)
    return 0


def check(kernel: str, dtype: str, dry: bool) -> Iterator[str]:
    """Yield a line for each case of a kernel that fails in a dtype."""
    largest = 0.0
    for subject in AttestationPlan(kernels=[kernel], dtypes=[dtype], tiny=dry).subjects():
        verdict, usable = run_subject(subject, "cpu" if dry else "cuda")
        largest = max(largest, float("inf") if verdict.error is None else verdict.error)
        if not verdict.passed:
            yield f"WRONG [{verdict.case}] {dtype}: {verdict.problem}"
        if not usable:
            yield "the other cases did not run: the device refuses this process"
            break
    print(f"{kernel} in {dtype}: largest error {largest:.1e} over all options")


@dataclass(frozen=True)
class Clock:
    """Times on the GPU. A dry run executes everything and measures nothing."""

    dry: bool

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median of as many runs as fit into a second: 5 to 100."""
        run()
        if self.dry:
            return 1.0
        times: list[float] = []
        torch.cuda.synchronize()
        until = time.monotonic() + 1.0
        while len(times) < 5 or (time.monotonic() < until and len(times) < 100):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(4_000_000)  # about 2 ms: the CPU gets ahead and adds no time
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return sorted(times)[len(times) // 2]

    def memory(self, run: Callable[[], object]) -> float:
        """Return the bytes that a run allocates at its peak."""
        if self.dry:
            run()
            return 1.0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return float(torch.cuda.max_memory_allocated() - before)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second that a large copy reads and writes."""
        source = torch.randn(1 << (9 if self.dry else 29), device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))

    @cached_property
    def rate(self) -> float:
        """Operations per second of a large matrix product in bf16."""
        side = 16 if self.dry else 8192
        a, b = torch.randn(2, side, side, device=self.device).bfloat16()
        return 2 * side**3 / self.seconds(lambda: torch.mm(a, b))

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def number(self, value: float) -> str:
        """Format a figure; a dry run has none."""
        return "—" if self.dry else f"{value:.2f}"

    def milliseconds(self, seconds: float) -> str:
        return f"{self.number(seconds * 1e3)} ms"


# Kernels


@dataclass(frozen=True)
class Passes:
    """Seconds of each pass, and the peak memory of both in bytes."""

    forward: float
    backward: float
    memory: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def passes(run: Callable[..., Any], inputs: dict[str, Tensor], clock: Clock) -> Passes:
    def outputs() -> tuple[Tensor, ...]:
        y = run(**inputs)
        return y if isinstance(y, tuple) else (y,)

    once = outputs()
    leaves = [x for x in inputs.values() if x.requires_grad]
    above = [torch.randn_like(y) for y in once]
    return Passes(
        clock.seconds(outputs),
        clock.seconds(lambda: torch.autograd.grad(once, leaves, above, retain_graph=True)),
        clock.memory(lambda: torch.autograd.grad(outputs(), leaves, above)),
    )


def report(kernel: str, task: Timed, clock: Clock) -> None:
    """Print our times with their fraction of the device's limit, and a line for each peer."""
    peers = {**task.peers, **({NEXT_PROGRAMS: task.ours} if kernel in NEXT else {})}
    ours = passes(task.ours, task.inputs, clock)
    times = (
        f"{clock.milliseconds(ours.forward)} forward, {clock.milliseconds(ours.backward)} backward"
    )
    print(f"{task.name}: {times}; {of_the_limit(task, ours, clock)}", flush=True)
    for name, peer in peers.items():
        try:
            with choice.next_programs([kernel] if name == NEXT_PROGRAMS else []):
                theirs = passes(peer, task.inputs, clock)
        except Exception as error:
            print(f"  beside {name}: failed: {type(error).__name__}: {error}"[:300])
            continue
        ratios = (
            f"{clock.number(theirs.forward / ours.forward)}x forward,"
            f" {clock.number(theirs.backward / ours.backward)}x backward,"
            f" {clock.number(theirs.both / ours.both)}x both,"
            f" {clock.number(ours.memory / theirs.memory)} of its memory"
        )
        print(f"  beside {name}: {ratios} (peer: {of_the_limit(task, theirs, clock)})", flush=True)


def of_the_limit(task: Timed, measured: Passes, clock: Clock) -> str:
    """Return the fraction of the rate of a copy, or of a matrix product if that is the limit."""
    if task.operations:
        fraction = task.operations / measured.both / clock.rate
        return f"{clock.number(fraction)} of the matrix rate"
    forward = task.moved[0] / measured.forward / clock.bandwidth
    backward = task.moved[1] / measured.backward / clock.bandwidth
    return f"{clock.number(forward)} and {clock.number(backward)} of copy"


# Models


@dataclass(frozen=True)
class Variant:
    name: str
    model: str
    kernel: Kernel = "auto"
    compiled: bool = False


VARIANTS = (
    Variant("hybrid", "hybrid-1b"),
    Variant("Transformer", "transformer-1b"),
    Variant("compiled hybrid", "hybrid-1b", compiled=True),
    Variant("compiled Transformer", "transformer-1b", compiled=True),
    Variant("hybrid in plain torch", "hybrid-1b", kernel="torch"),
)
BESIDE = (
    ("hybrid", "Transformer"),
    ("compiled hybrid", "compiled Transformer"),
    ("hybrid", "hybrid in plain torch"),
    ("compiled hybrid", "hybrid"),
)

LIBRARIES: tuple[Implementation, ...] = ("cudnn", "flash")
"""Implementations of attention that torch offers on CUDA in half precision."""


def compare_models(length: int, clock: Clock) -> int:
    """Time a step of each variant with each library's attention: forward, loss and backward of one
    row. Variants are compared by their faster library."""
    times: dict[str, float] = {}
    for variant in VARIANTS:
        by_library: dict[str, float] = {}
        for library in LIBRARIES:
            torch.manual_seed(0)
            name = f"{variant.name}, {library}, {length} tokens"
            try:
                step, parameters = model_step(variant, length, clock)
                with attention_order(("math",) if clock.dry else (library,)):
                    by_library[library] = clock.seconds(step)
                    memory = clock.memory(step)
                print(
                    f"{name}, {parameters:,} parameters:"
                    f" {clock.milliseconds(by_library[library])},"
                    f" {clock.number(memory / 2**30)} GiB",
                    flush=True,
                )
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
            step = None
            torch._dynamo.reset()
            if not clock.dry:
                torch.cuda.empty_cache()
        if len(by_library) == len(LIBRARIES):
            first, second = LIBRARIES
            ratio = clock.number(by_library[second] / by_library[first])
            print(f"{variant.name} at {length} tokens: {first} {ratio}x the speed of {second}")
        if by_library:
            times[variant.name] = min(by_library.values())
        for ours, theirs in BESIDE:
            if variant.name in (ours, theirs) and ours in times and theirs in times:
                ratio = clock.number(times[theirs] / times[ours])
                print(f"{ours} at {length} tokens: {ratio}x the speed of the {theirs}", flush=True)
    return 0 if len(times) >= len(VARIANTS) - 1 and "hybrid" in times else 1


def model_step(variant: Variant, length: int, clock: Clock) -> tuple[Callable[[], None], int]:
    """Build the model of a variant with random weights."""
    kernel: Kernel = "triton" if clock.dry and variant.kernel == "auto" else variant.kernel
    config = with_kernels((TINY if clock.dry else MODELS)[variant.model], kernel)
    with torch.device(clock.device):
        model = Model(config)
    model.init_weights(0)
    model.to(torch.float32 if clock.dry else torch.bfloat16)
    if variant.compiled:
        backend: Backend = "aot_eager" if clock.dry else "inductor"
        compile_blocks(model, torch.device(clock.device), backend)
    tokens = torch.randint(config.vocab_size, (1, length), device=clock.device)
    weights = torch.ones(1, length, device=clock.device)

    def step() -> None:
        total, _ = model.loss(model.hidden(tokens)[0], tokens, weights)
        (total / length).backward()
        model.zero_grad()

    return step, sum(p.numel() for p in model.parameters())
