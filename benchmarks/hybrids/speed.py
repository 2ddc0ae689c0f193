"""Compare the CPU seconds of training and of generation of the models of `compare-hybrids`.

    python -m benchmarks.hybrids.speed

The models take turns in one process of one thread, so the ratios hold on a busy machine too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

from headrace.models.accounting.memory import generation_bytes
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.model.generate import generate
from headrace.models.model.model import Model
from headrace.reports.hybrids.prepare import SHIPPED

ROWS, LENGTH = 2, 512
GENERATED = 64
ROUNDS = 3


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def train_step(model: Model, tokens: torch.Tensor) -> None:
    logits = model(tokens)
    cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    model.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    models = {}
    for name in SHIPPED:
        models[name] = Model(load_model_config(name))
        models[name].init_weights(1)
    tokens = torch.randint(2048, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    prompt = tokens[0].tolist()
    training: dict[str, list[float]] = {name: [] for name in models}
    generation: dict[str, list[float]] = {name: [] for name in models}
    for number in range(ROUNDS + 1):
        for name, model in models.items():
            seconds = cpu_seconds(lambda model=model: train_step(model, tokens))  # type: ignore[misc]
            generated = cpu_seconds(
                lambda model=model: generate(model, [prompt], GENERATED)  # type: ignore[misc]
            )
            if number:  # the first round warms up
                training[name].append(seconds)
                generation[name].append(generated)
    first, *_ = SHIPPED
    for name, model in models.items():
        step, text = statistics.median(training[name]), statistics.median(generation[name])
        state = generation_bytes(model.config, LENGTH, precision=PRECISIONS["fp32"])
        print(
            f"{name}: {ROWS * LENGTH / step:,.0f} trained tokens a CPU second, "
            f"{statistics.median(training[first]) / step:.2f}x {first}; {GENERATED} tokens after "
            f"{LENGTH} in {text:.2f} s, {statistics.median(generation[first]) / text:.2f}x; "
            f"{state:,} bytes of state"
        )


if __name__ == "__main__":
    main()
