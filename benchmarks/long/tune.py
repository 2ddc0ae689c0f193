"""Tuning: predicted steps beside measured ones, on layouts and lengths that calibrated nothing.

    python -m benchmarks.long.tune [FOLDER [RANKS]]

Ranks of this machine's CPU with one thread each (one by default): `trainer profile`, a plan for two
lengths, `trainer tune`, and then runs of other layouts and lengths. Seconds are CPU seconds of the
busiest rank, medians of the steps of the fastest of some runs: other programs and machines beside
this one only slow a run down. A FOLDER keeps what is done: the same command continues after an
interruption.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.console import config as reader
from headrace.models.config.config import load_model_config
from headrace.models.config.options.recompute import Rule
from headrace.planner.hardware import Hardware
from headrace.planner.search.assemble import build_layout_plan
from headrace.planner.search.make import PlanRequest, make_plans, parse_settings, uniform_phase
from headrace.planner.search.search import search
from headrace.planner.tune import tune as work
from headrace.planner.tune.folder import TuneFolder
from headrace.planner.tune.prices import PlanPricer
from headrace.planner.tune.trial import LayoutTrial, ProcessRunner, TrialResult
from headrace.trainer.folders.request_folder import write
from headrace.trainer.run.config import RunConfig
from headrace.trainer.run.layout_plan import LayoutPlan, load_plan

MODEL, BATCH = "tiny-transformer", 2048
"""Model, and tokens of a rank in a step, at most."""
LENGTHS = (256, 512)
"""Tokens of a row in the calibrating trials."""
TRIALS, STEPS = 3, 8
HELD_OUT: dict[int, tuple[tuple[int, str, Rule], ...]] = {
    1: (
        (128, "engine=fsdp2", "none"),
        (384, "engine=fsdp2", "block"),
        (512, "engine=fsdp2,rows=1", "operator"),
        (1024, "engine=fsdp2,rows=1", "none"),
        (2048, "engine=fsdp2", "none"),
        (768, "engine=deepspeed,zero=1", "none"),
    ),
    2: (
        (128, "tp=1,cp=1,engine=fsdp2,gather=block", "none"),
        (384, "tp=1,cp=1,engine=fsdp2,gather=step", "block"),
        (512, "tp=2,engine=fsdp2", "none"),
        (1024, "cp=2,engine=fsdp2", "none"),
        (512, "pp=2", "none"),
        (768, "tp=1,cp=1,engine=deepspeed,zero=2", "operator"),
    ),
}
"""Lengths, layouts and recompute rules that are predicted, then run, by the number of ranks."""
TURNS = 4
"""Runs of each layout, of which the fastest counts."""
LIMIT = 0.15


@dataclass(frozen=True)
class Fastest:
    """Runs each trial several times; its result is that of the fastest run."""

    runner: ProcessRunner

    def __call__(self, trial: LayoutTrial) -> TrialResult:
        found = [self.runner(trial) for _ in range(TURNS)]
        measured = [each for each in found if each.seconds is not None]
        return min(measured, key=lambda each: each.seconds or 0.0, default=found[0])


def main(root: Path, ranks: int) -> list[float]:
    """Print the figures; return the relative errors of held-out steps."""
    root.mkdir(parents=True, exist_ok=True)
    file = root / "cpu.yaml"
    if not (root / "profiled").exists():
        cores = max(2, os.cpu_count() or 2)  # one thread each
        for links in ([], ["--links"]):
            trainer("profile", "--device", "cpu", "--processes", cores, "--out", file, *links)
        write(root / "profiled", "")
    hardware = Hardware.load(file)
    run = replace(RunConfig(), precision="fp32")
    pricer = PlanPricer(load_model_config(MODEL), run)
    plan = planned(root / "plan.yaml", hardware, pricer, ranks)
    request = work.TuneRequest(
        plan=plan,
        plan_file="plan.yaml",
        pricer=pricer,
        hardware=hardware,
        memory=0.9,
        trials=TRIALS,
        steps=STEPS,
        words=("--model", MODEL, "threads=1"),
    )
    runner = Fastest(ProcessRunner(request.words))
    outcome = work.tune(request, TuneFolder(root / "tune"), runner)
    print("\n".join(f"tune: {line}" for line in work.format_lines(outcome)), flush=True)
    after = Hardware.load(root / "tune" / "hardware.yaml")
    return held_out(TuneFolder(root / "held-out"), pricer, hardware, after, runner, ranks)


def batch(length: int, ranks: int) -> int:
    """Return the tokens of a step."""
    return BATCH // length * length * ranks


def planned(file: Path, hardware: Hardware, pricer: PlanPricer, ranks: int) -> LayoutPlan:
    if not file.exists():
        phases = [
            replace(uniform_phase(length, batch(length, ranks) // length), name=f"of{length}")
            for length in LENGTHS
        ]
        request = PlanRequest(
            model=pricer.model, run=pricer.run, hardware=hardware, gpus=ranks, phases=phases
        )
        write(file, reader.dump(make_plans(request).best))
    return load_plan(file)


def held_out(
    folder: TuneFolder,
    pricer: PlanPricer,
    before: Hardware,
    after: Hardware,
    runner: Fastest,
    ranks: int,
) -> list[float]:
    """Print predicted and measured figures of each held-out layout; return the errors of steps."""
    errors, memory = [], []
    for number, (length, words, rule) in enumerate(HELD_OUT[ranks]):
        file, tokens = folder.candidate(number), batch(length, ranks)
        if not file.exists():
            costs = pricer.costs(after, length, tokens)
            budget = after.usable_memory * 0.9
            wanted = parse_settings(words)
            [found] = search(costs, ranks, budget, settings=wanted, num_best=1).candidates
            made = build_layout_plan([costs], {costs.phase.name: found.solution.price}, found)
            layers = tuple(replace(span, recompute=rule) for span in made.layers)
            write(file, reader.dump(replace(made, layers=layers)))
        plan = load_plan(file)
        trial = partial(measure, runner, plan, file, length, tokens)
        result = folder.once(f"{number:02}", trial)
        seconds, most = result.seconds, result.memory
        if seconds is None or most is None:
            print(f"held out: rows of {length}, {words}: {result}")
            continue
        prices = [pricer.price(plan, by, length, tokens) for by in (before, after)]
        alone, corrected = (predicted / seconds for predicted, _ in prices)
        errors.append(corrected - 1)
        memory.append(prices[1][1] / most - 1)
        print(
            f"held out: rows of {length:>4}, {words}, recompute {rule}: {seconds:.4f} CPU s "
            f"a step; by the profile alone {alone:.2f}, corrected {corrected:.2f}; memory "
            f"{1 + memory[-1]:.2f} of {most / 2**20:.1f} MiB",
            flush=True,
        )
    worst = max(errors, key=abs)
    print(
        f"held out: worst step {worst:+.1%}, {abs(worst) / LIMIT:.2f} of the limit of {LIMIT:.0%}; "
        f"worst memory {max(memory, key=abs):+.1%}"
    )
    return errors


def measure(
    runner: Fastest, plan: LayoutPlan, file: Path, length: int, tokens: int, place: Path
) -> TrialResult:
    return runner(
        LayoutTrial(
            plan=plan, file=file, folder=place, steps=STEPS, seq_len=length, batch_tokens=tokens
        )
    )


def trainer(*words: object) -> None:
    command = [sys.executable, "-m", "headrace.trainer.cli", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), count)
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place), count)
