"""CPU seconds of steps that record signals, compared with steps that record none.

    python -m benchmarks.signals

A hybrid model with experts trains in the real loop at world size 1 with FSDP2: four micro-batches
of 512 tokens. Each variant runs in a process of its own with one thread, and the processes take
their steps in turns, so that a slower machine slows all of them. Variants that watch do so in every
second step: the others show what a step costs that is not watched. A ratio is the median over the
rounds.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

ROUNDS, COLD = 12, 2
"""Steps of each variant, and those at the begin that do not count."""
TOKENS, MICRO_BATCHES = 512, 4
EVERY = 2
PLAIN = "plain"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "signals by layer": {"layers_every": EVERY},
    "gradient noise scale": {"noise_every": EVERY},
    "own times of ranks": {"times_ranks": True},
    "average of the weights": {"ema": 0.9999},
}


def serve(options: dict[str, Any], parent: Connection) -> None:
    """Take a step on each request; send its CPU seconds."""
    import torch

    from headrace.models.accounting.count import build_meta
    from headrace.models.config.config import ModelConfig
    from headrace.models.config.options import OPTIONS
    from headrace.models.config.options.precision import PRECISIONS
    from headrace.models.model.model import initial_weights
    from headrace.trainer.cluster import ranks as group
    from headrace.trainer.engines.engine import load_weights
    from headrace.trainer.engines.fsdp2 import Fsdp2Config
    from headrace.trainer.engines.objective import Objective
    from headrace.trainer.engines.optimizers.adamw import AdamWConfig
    from headrace.trainer.layout.config import LayoutConfig
    from headrace.trainer.layout.groups import create_groups
    from headrace.trainer.loop.hooks.hook import Hook

    from ._synthetic_run import train

    torch.set_num_threads(1)  # idle threads would add to the CPU time
    config = ModelConfig(
        vocab_size=2048,
        width=256,
        pattern="[mamba, attention] * 2",
        mlp="experts",
        operators={
            "mamba": OPTIONS["mamba2"](state_size=64, head_dim=64),
            "attention": OPTIONS["attention"](heads=8),
            "experts": OPTIONS["moe"](experts=8, hidden=512),
        },
    )
    group.initialise("gloo", timedelta(minutes=5))
    parallel = create_groups(LayoutConfig(), "cpu", timedelta(minutes=5))
    objective = Objective(build_meta(config))
    settings = AdamWConfig(ema=options.pop("ema", None))
    engine = Fsdp2Config().build(objective, settings, PRECISIONS["fp32"], parallel)
    load_weights(engine, initial_weights(config, 1))
    parent.send(sum(parameter.numel() for parameter in objective.parameters()))
    began = [time.process_time()]

    class Turns(Hook):
        def step_begins(self, step: int) -> None:
            if step:
                parent.send(time.process_time() - began[0])
            parent.recv()
            began[0] = time.process_time()

    train(
        engine,
        parallel,
        config.vocab_size,
        [Turns()],
        steps=ROUNDS + 1,
        tokens=TOKENS,
        boundaries=lambda row: [0, TOKENS],
        micro_batches=MICRO_BATCHES,
        **options,
    )


def ratios(watching: Sequence[float], plain: Sequence[float], steps: range) -> float:
    return median(watching[step] / plain[step] for step in steps)


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name, options in VARIANTS.items():
        ours, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(options, theirs), daemon=True))
        processes[-1].start()
        pipes[name] = ours
    parameters = max(pipe.recv() for pipe in pipes.values())
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(ROUNDS):
        for name, pipe in pipes.items():
            pipe.send(True)
            seconds[name].append(pipe.recv())
    for process in processes:
        process.terminate()
    plain = seconds.pop(PLAIN)
    tokens = TOKENS * MICRO_BATCHES
    print(
        f"step of {tokens:,} tokens, {parameters / 1e6:.0f}M parameters in fp32: "
        f"{median(plain[COLD:]):.2f} CPU s without signals"
    )
    for name, watching in seconds.items():
        if "every" in "".join(VARIANTS[name]):
            watched = ratios(watching, plain, range(COLD, ROUNDS, EVERY))
            unwatched = ratios(watching, plain, range(COLD + 1, ROUNDS, EVERY))
            print(f"{name}: {watched:.3f} of it in a watched step, {unwatched:.3f} in another one")
        else:
            print(f"{name}: {ratios(watching, plain, range(COLD, ROUNDS)):.3f} of it in every step")


if __name__ == "__main__":
    main()
