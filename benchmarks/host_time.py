"""Host time of a training step: what Python and torch do to launch it, without a GPU.

    python -m benchmarks.host_time [MODEL …] [--steps 20] [--profile PASS]

The step is the real one: the loop, FSDP2 on one rank, bf16 with fp32 masters, clipping, AdamW, one
micro-batch of one row. The model has all its layers, and so narrow ones that the arithmetic takes
no time (oneDNN is off: it takes 60 µs to begin a product in bf16). Fused kernels go through Triton
up to the launch, which is an empty C call; so is the attention of packed rows. Choices by device
are those of a GPU. What a driver does for a launch (3 to 5 µs) is not in the time.

Further steps, with a clock around each, give the part that launches take, and calls of fused
kernels' ops without these launches.

The peer is the Transformer by hand of gpu_step.py, with as many layers as transformer-1b, rows of
one document, fused AdamW on bf16 weights.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import Tensor
from torch.distributed import HashStore

from headrace.models.accounting.count import build_meta
from headrace.models.config.config import ModelConfig
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.kernels import choice, op
from headrace.models.kernels.launch import BoundLaunch, KernelLauncher
from headrace.models.layers import linear
from headrace.models.model.model import initial_weights
from headrace.models.operators import attention
from headrace.trainer.engines.engine import load_weights
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import create_groups
from headrace.trainer.loop import loop
from headrace.trainer.loop.documents.piece_losses import StepPieces
from headrace.trainer.loop.guard import Guard
from headrace.trainer.loop.hooks.hook import Hook, StepRecord

from ._gpu_models import hybrid, mamba2, with_kernels
from ._synthetic_run import train
from .long._gpu_peers import transformer_by_hand

TOKENS, DOCUMENTS, WARMUP = 32, 24, 4
"""Tokens of a row (whole blocks of every kernel, as on a GPU), documents of a packed row (those of
16,384 tokens), steps before the first that is timed."""
PASSES = ("forward", "backward", "engine", "documents", "step")
"""`documents` sums the losses by document, as runs of a mixture do."""
LAUNCHES, OPS = "launches", "ops"
MODELS: dict[str, ModelConfig] = {
    "hybrid-1b": hybrid("([se, mr, li] * 2 + [attention]) * 3", 64, 8, 4, 2, 16),
    "transformer-1b": hybrid("[attention] * 21", 64, 8, 4, 2, 16),
    "mamba2-1.3b": mamba2("[mamba] * 48", 64, 8, 16, 8),
}
"""Models of gpu_step.py, with all layers, narrow."""


class _Program:
    """A compiled Triton program whose launch does nothing."""

    function, packed_metadata = 0, ()
    run = "".format  # a C function that takes any arguments

    def launch_metadata(self, *_: Any) -> None: ...


class _Driver:
    """The driver of an H100 that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def empty_launches() -> Iterator[None]:
    """Let kernels take tensors of the CPU, and launch nothing."""
    from torch.nn.attention import varlen
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def compile_nothing(program: Any, key: Any, *_: Any) -> _Program:
        program.device_caches[0][0][key] = compiled = _Program()
        return compiled

    def attend(q: Tensor, *_: Any, **__: Any) -> Tensor:
        return q.clone()

    driver.set_active(_Driver())
    with ExitStack() as patched:
        for owner, name, value in (
            (JITFunction, "_do_compile", compile_nothing),
            (choice, "find_device_problem", lambda _: None),
            (op, "find_device_problem", lambda _: None),
            (attention, "supports_packed_attention", lambda *_: True),
            (linear, "fuses_gradient_sums", lambda *_: True),
            (varlen, "varlen_attn", attend),
        ):
            patched.enter_context(mock.patch.object(owner, name, value))
        yield


class Clock(Hook):
    """CPU milliseconds of the passes of each step."""

    def __init__(self, profiled: str = "") -> None:
        """`profiled` names a pass whose functions are profiled."""
        self.passes: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []
        self.begin = time.thread_time()
        self.inside = 0.0
        """CPU milliseconds of the parts inside the present one."""
        self.calls: Counter[str] = Counter()
        self.programs: Counter[str] = Counter()
        """Launches by program."""
        self.profiled = profiled
        self.profile = cProfile.Profile()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function with its CPU time added to a pass."""

        def run(*args: Any, **options: Any) -> Any:
            begin = time.thread_time()
            if name == self.profiled and len(self.steps) >= WARMUP:
                result = self.profile.runcall(function, *args, **options)
            else:
                result = function(*args, **options)
            self.passes[name] = self.passes.get(name, 0) + 1e3 * (time.thread_time() - begin)
            return result

        return run

    def step_begins(self, step: int) -> None:
        self.passes = {}
        self.begin = time.thread_time()

    def step_done(self, record: StepRecord | None) -> None:
        self.steps.append({**self.passes, "step": 1e3 * (time.thread_time() - self.begin)})

    def time_apart(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds its CPU time to a part, and not to the part that calls it."""

        def run(*args: Any, **options: Any) -> Any:
            begin, inside = time.thread_time(), self.inside
            self.inside = 0.0
            result = function(*args, **options)
            milliseconds = 1e3 * (time.thread_time() - begin)
            self.passes[name] = self.passes.get(name, 0) + milliseconds - self.inside
            self.inside = inside + milliseconds
            self.calls[name] += 1
            return result

        return run

    def fastest(self) -> dict[str, float]:
        """Return the least time of each pass: what else the machine does adds to the others."""
        return {name: min(step[name] for step in self.steps[WARMUP:]) for name in self.steps[-1]}


def run_headrace(
    config: ModelConfig, *, packed_rows: bool, steps: int, profiled: str = "", parts: bool = False
) -> Clock:
    """Train. With `parts`, also launches and calls of ops have a clock of their own."""
    parallel = create_groups(LayoutConfig(), "cpu", timedelta(minutes=1))
    model = build_meta(with_kernels(config, "triton"))
    engine: Any = Fsdp2Config().build(Objective(model), AdamWConfig(), PRECISIONS["bf16"], parallel)
    load_weights(engine, dict(initial_weights(config, 0)))
    ends = [TOKENS * n // DOCUMENTS for n in range(DOCUMENTS + 1)] if packed_rows else [0, TOKENS]
    clock, kind = Clock(profiled), type(engine)

    def forward(engine: Any, *inputs: Any) -> Any:
        tokens, targets, weights, documents, *stream = inputs
        # On a GPU, rows of one document have no documents.
        return call(engine, tokens, targets, weights, documents if packed_rows else None, *stream)

    call = kind.__call__
    with ExitStack() as patched, empty_launches():
        patched.enter_context(torch.autograd.set_multithreading_enabled(False))
        for owner, name, timed in (
            (kind, "__call__", clock.timed("forward", forward)),
            (kind, "backward", clock.timed("backward", kind.backward)),
            (loop, "launch", clock.timed("engine", loop.launch)),
            (StepPieces, "sum", clock.timed("documents", StepPieces.sum)),
            *(_timed_parts(clock) if parts else ()),
        ):
            patched.enter_context(mock.patch.object(owner, name, timed))
        train(
            engine,
            parallel,
            config.vocab_size,
            [clock],
            steps=WARMUP + steps,
            tokens=TOKENS,
            boundaries=lambda _: ends,
            guard=Guard(not_finite="skip"),  # what no kernel wrote is no number
            records_documents=True,
        )
        return clock


def _timed_parts(clock: Clock) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    def launch(launcher: KernelLauncher, *arguments: Any, **constants: Any) -> None:
        clock.programs[launcher.program.fn.__name__] += 1
        unbound(launcher, *arguments, **constants)

    def launch_bound(launch: BoundLaunch, *tensors: Tensor) -> None:
        clock.programs[launch._launcher.program.fn.__name__] += 1
        bound(launch, *tensors)

    unbound, bound = KernelLauncher.launch, BoundLaunch.__call__
    yield KernelLauncher, "launch", clock.time_apart(LAUNCHES, launch)
    yield BoundLaunch, "__call__", clock.time_apart(LAUNCHES, launch_bound)
    yield op.Op, "__call__", clock.time_apart(OPS, op.Op.__call__)


def run_peer(config: ModelConfig, steps: int) -> Clock:
    """Train the Transformer by hand."""
    weights, loss = transformer_by_hand(config, TOKENS, "cpu")
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    clock = Clock()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    forward, engine = clock.timed("forward", loss), clock.timed("engine", update)
    with torch.autograd.set_multithreading_enabled(False):
        for step in range(WARMUP + steps):
            clock.step_begins(step)
            total = forward(torch.randint(config.vocab_size, (1, TOKENS + 1)))
            clock.timed("backward", total.backward)()
            engine()
            clock.step_done(None)
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", default="", choices=("", "forward", "backward", "engine"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    dist.init_process_group("cpu:fake", store=HashStore(), rank=0, world_size=1)
    peer = run_peer(MODELS["transformer-1b"], options.steps).fastest()
    print(f"peer, Transformer by hand: {_describe(peer)}")
    for name in options.models:
        for rows in ("packed", "one document"):
            arguments: dict[str, Any] = {
                "config": MODELS[name],
                "packed_rows": rows == "packed",
                "steps": options.steps,
            }
            clock = run_headrace(**arguments, profiled=options.profile)
            times, parts = clock.fastest(), run_headrace(**arguments, parts=True)
            counts = {part: n // len(parts.steps) for part, n in parts.calls.items()}
            part_times = parts.fastest()
            layers = len(MODELS[name].layers) / len(MODELS["transformer-1b"].layers)
            ratio = times["step"] / layers / peer["step"]
            print(
                f"{name}, {rows}: {_describe(times)}; of these "
                f"{counts[LAUNCHES]} launches of kernels {part_times[LAUNCHES]:.1f}, "
                f"{counts[OPS]} calls of their ops {part_times[OPS]:.1f}; "
                f"a layer takes {ratio:.2f}x the peer's",
                flush=True,
            )
            steps = len(parts.steps)
            programs = (f"{n // steps} {name}" for name, n in parts.programs.most_common())
            print(f"    launches: {', '.join(programs)}", flush=True)
            if options.profile:
                pstats.Stats(clock.profile).sort_stats("tottime").print_stats(35)
    dist.destroy_process_group()


def _describe(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {times[name]:.1f}" for name in PASSES if name in times) + " CPU ms"


if __name__ == "__main__":
    main()
