"""CPU seconds of a training step of each engine, compared with plain torch, at world size 1.

    python -m benchmarks.trainer_step

Model (a hybrid of about 50M parameters), rows and AdamW are the same; plain torch is a loop of
forward, backward, clip and step. At world size 1 DeepSpeed adds a few copies of all gradients and
weights, whatever the batch; the step has 2,048 tokens, a quarter of a default micro-batch. Each
engine runs in its own process with one thread. The engines step in turns, so that a slower machine
slows all of them. The figures are means over all rounds.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median

LIMIT = 1.10
"""DeepSpeed ZeRO-1 within 10% of plain torch."""
ROUNDS, ROWS, LENGTH = 6, 4, 512
WAIT_LIMIT = 0.01
LOADED = 200
"""Steps over which the loader alone is measured."""
PLAIN = "torch"
ENGINES = ("deepspeed", "fsdp2")


def stepper(
    engine: str, *, width: int = 640, repeats: int = 3, length: int = LENGTH, compiled: bool = False
) -> tuple[int, Callable[[], None]]:
    """Return the number of parameters, and a function that takes a step; `compiled` by
    torch.compile. The model has `repeats` blocks of each kind."""
    import torch

    from headrace.models.accounting.count import build_meta
    from headrace.models.config.config import ModelConfig
    from headrace.models.config.options import OPTIONS
    from headrace.models.config.options.precision import PRECISIONS
    from headrace.models.model.model import initial_weights
    from headrace.trainer.cluster import ranks as group
    from headrace.trainer.engines import ENGINES as KNOWN
    from headrace.trainer.engines.engine import load_weights
    from headrace.trainer.engines.groups import parameter_groups
    from headrace.trainer.engines.objective import Objective, parameters
    from headrace.trainer.engines.optimizers.adamw import AdamWConfig
    from headrace.trainer.engines.update import update
    from headrace.trainer.layout.config import LayoutConfig
    from headrace.trainer.layout.groups import create_groups

    torch.set_num_threads(1)  # idle threads would add to the CPU time
    operators = {
        "se": OPTIONS["hyena-se"](groups=64),
        "mamba": OPTIONS["mamba2"](state_size=64, head_dim=64),
        "attention": OPTIONS["attention"](heads=8),
        "glu": OPTIONS["glu"](hidden=12 * width // 5),
    }
    config = ModelConfig(
        vocab_size=8192,
        width=width,
        pattern=f"[se, mamba, attention] * {repeats}",
        mlp="glu",
        operators=operators,
    )
    objective = Objective(build_meta(config))
    if engine == PLAIN:
        objective.to_empty(device="cpu")
        objective.model.init_weights(1)
    named = parameters(objective)
    count = sum(p.numel() for p in named.values())
    settings = AdamWConfig()
    tokens = torch.randint(0, 8192, (ROWS, length + 1))
    rows = (tokens[:, :-1], tokens[:, 1:], torch.ones(ROWS, length), None)
    total = float(ROWS * length)

    if engine == PLAIN:
        groups = parameter_groups(objective.model, settings)
        plain = settings.build(objective.model, groups, named)

        def step() -> None:
            (objective(*rows).total / total).backward()
            torch.nn.utils.clip_grad_norm_(objective.parameters(), settings.clip)
            plain.step()
            plain.zero_grad(set_to_none=True)

    else:
        group.initialise("gloo", timedelta(minutes=5))
        parallel = create_groups(LayoutConfig(), "cpu", timedelta(minutes=5))
        config_of_engine = KNOWN[engine](compile=compiled)  # type: ignore[call-arg]
        ours = config_of_engine.build(objective, settings, PRECISIONS["fp32"], parallel)
        load_weights(ours, initial_weights(config, 1))

        def step() -> None:
            ours.backward(ours(*rows).total / total, last=True)
            update(ours, settings.lr)

    return count, step


def serve(engine: str, parent: Connection) -> None:
    """Take a step on each request; send its CPU seconds."""
    count, step = stepper(engine)
    step()
    parent.send(count)
    while parent.recv():
        began = time.process_time()
        step()
        parent.send(time.process_time() - began)


def loader_wait() -> float:
    """Return the median seconds that a step waits for its rows, read and hashed in the step."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.data.small_data import plan_of, random_documents, write_dataset

    from headrace.dataplane.loader.loader import Loader

    with tempfile.TemporaryDirectory() as folder:
        write_dataset(folder, random_documents(0, 2000, longest=2000))
        phase = {"seq_len": LENGTH, "batch": ROWS * LENGTH, "weights": {"all": 1}}
        phase["tokens"] = LOADED * ROWS * LENGTH
        spec = {"sources": {"all": {"data": folder}}, "phases": {"one": phase}}
        rows = iter(Loader(plan_of(spec), micro_batch=ROWS))
        taken = []
        for _ in range(LOADED):
            began = time.perf_counter()
            next(rows)
            taken.append(time.perf_counter() - began)
    return median(taken)


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    engines = {}
    for engine in (PLAIN, *ENGINES):
        engines[engine], theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(engine, theirs), daemon=True).start()
        theirs.close()  # so that recv() fails if the process ends
    counts = {engine: pipe.recv() for engine, pipe in engines.items()}
    taken: dict[str, list[float]] = {engine: [] for engine in engines}
    for number in range(ROUNDS):
        for engine in list(engines)[:: (-1) ** number]:
            engines[engine].send(True)
            taken[engine].append(engines[engine].recv())
    for pipe in engines.values():
        pipe.send(False)
    plain = mean(taken[PLAIN])
    for engine in ENGINES:
        ours = mean(taken[engine])
        limit = f"; the limit is {LIMIT:.2f}" if engine == "deepspeed" else ""
        print(
            f"{engine} step, {counts[engine] / 1e6:.0f}M parameters: {ours:.2f} CPU s, "
            f"{ours / plain:.2f} of plain torch's {plain:.2f}{limit}"
        )
    waited = loader_wait()
    print(
        f"waiting for rows: {1000 * waited:.2f} ms per step, {waited / plain:.3%} of plain "
        f"torch's; the limit is {WAIT_LIMIT:.0%}"
    )


if __name__ == "__main__":
    main()
