"""CPU seconds of a training step under each engine, beside plain torch, at world 1.

python -m benchmarks.trainer_step

The same hybrid of about 50M parameters, the same rows, the same AdamW; plain torch is a loop of
forward, backward, clip and step. What DeepSpeed adds at world 1 is a few copies of all gradients
and weights, whatever the batch; the step has 2,048 tokens, a quarter of a default micro-batch.
Every engine runs in a process of its own, plain torch first and last, so that a machine that grows
slower does not flatter anyone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

LIMIT = 1.10
"""DeepSpeed ZeRO-1 within 10% of plain torch."""
STEPS, ROWS, LENGTH = 3, 4, 512
WAIT_LIMIT = 0.01
LOADED = 200
"""Steps that the loader alone is measured over."""
PARTS = ("torch", "deepspeed", "fsdp2", "loader", "torch")


def measure(engine: str) -> None:
    """Print the median CPU seconds of a step."""
    import torch

    from headrace.models.config import ModelConfig
    from headrace.models.model import Model
    from headrace.models.operators import OPTIONS
    from headrace.trainer import launch, optimizer
    from headrace.trainer.engines import ENGINES as KNOWN
    from headrace.trainer.engines import build
    from headrace.trainer.layout import LayoutConfig, join
    from headrace.trainer.objective import Objective, parameters, undecayed

    operators = {
        "se": OPTIONS["hyena-se"](groups=64),
        "mamba": OPTIONS["mamba2"](state_size=64, head_dim=64),
        "attention": OPTIONS["attention"](heads=8),
        "glu": OPTIONS["glu"](hidden=1536),
    }
    config = ModelConfig(
        vocab_size=8192,
        width=640,
        pattern="[se, mamba, attention] * 3",
        mlp="glu",
        operators=operators,
    )
    model = Model(config)
    model.init_weights(1)
    objective = Objective(model)
    named = parameters(objective)
    settings = optimizer.OptimizerConfig()
    tokens = torch.randint(0, 8192, (ROWS, LENGTH + 1))
    rows = (tokens[:, :-1], tokens[:, 1:], torch.ones(ROWS, LENGTH), None)
    total = float(ROWS * LENGTH)

    if engine == "torch":
        plain = optimizer.build(named, undecayed(objective), settings)

        def step() -> None:
            (objective(*rows).total / total).backward()
            torch.nn.utils.clip_grad_norm_(objective.parameters(), settings.clip)
            plain.step()
            plain.zero_grad(set_to_none=True)

    else:
        launch.initialise("gloo", timedelta(minutes=5))
        parallel = join(LayoutConfig(), "cpu", timedelta(minutes=5))
        ours = build(KNOWN[engine](), objective, settings, "fp32", parallel)

        def step() -> None:
            ours.backward(ours(*rows).total / total, last=True)
            ours.update(settings.lr)

    step()
    taken = []
    for _ in range(STEPS):
        began = time.process_time()
        step()
        taken.append(time.process_time() - began)
    print(f"{sum(p.numel() for p in named.values())} {median(taken)}")


def measure_loader() -> None:
    """Print the median seconds that a step waits for its rows, read and hashed in the step."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from small_data import plan_of, random_documents, write_dataset

    from headrace.dataplane.loader import Loader

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
    print(f"0 {median(taken)}")


def main() -> None:
    taken: dict[str, list[float]] = {}
    numel = 0
    for engine in PARTS:
        command = [sys.executable, "-m", "benchmarks.trainer_step", engine]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        count, seconds = done.stdout.split()[-2:]
        numel = max(numel, int(count))
        taken.setdefault(engine, []).append(float(seconds))
    base = sum(taken.pop("torch")) / 2
    (waited,) = taken.pop("loader")
    for engine, (seconds,) in taken.items():
        limit = f"; the limit is {LIMIT:.2f}" if engine == "deepspeed" else ""
        print(
            f"{engine} step, {numel / 1e6:.0f}M parameters: {seconds:.2f} CPU s, "
            f"{seconds / base:.2f} of plain torch's {base:.2f}{limit}"
        )
    print(
        f"waiting for rows: {1000 * waited:.2f} ms a step, {waited / base:.3%} of plain torch's; "
        f"the limit is {WAIT_LIMIT:.0%}"
    )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "loader":
        measure_loader()
    else:
        measure(sys.argv[1])
