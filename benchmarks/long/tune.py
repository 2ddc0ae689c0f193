"""Tuning: predicted steps beside measured ones, on layouts and lengths that calibrated nothing.

    python -m benchmarks.long.tune [FOLDER [TURNS]]

One and two ranks of this machine's CPU with one thread each: `trainer profile` and a plan for two
lengths; then, in turns, `trainer tune` and a run of each other layout and length. A turn is a whole
experiment, so a busy machine slows its calibration and its runs alike; the medians of the turns
count. Seconds are CPU seconds of the busiest rank. A loop of products beside each turn shows how
much the load of the machine lengthens them. A FOLDER keeps what is done: the same command continues
after an interruption. TURNS are 3 by default.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from headrace.console import config as reader
from headrace.models.config.config import load_model_config
from headrace.models.config.options.recompute import Rule
from headrace.planner.hardware import Hardware
from headrace.planner.search.assemble import build_layout_plan
from headrace.planner.search.make import PlanRequest, make_plans, parse_settings, uniform_phase
from headrace.planner.search.search import search
from headrace.planner.tune import tune as tuning
from headrace.planner.tune.folder import TuneFolder
from headrace.planner.tune.prices import PlanPricer
from headrace.planner.tune.trial import LayoutTrial, ProcessRunner
from headrace.trainer.folders.request_folder import write
from headrace.trainer.run.config import RunConfig
from headrace.trainer.run.layout_plan import LayoutPlan, load_plan

MODEL, BATCH = "tiny-transformer", 2048
"""Model, and tokens of a rank in a step, at most."""
LENGTHS = (256, 512)
"""Tokens of a row in the calibrating trials."""
TRIALS, STEPS, TURNS = 3, 8, 3
HELD_OUT: dict[int, tuple[tuple[int, str, Rule], ...]] = {
    1: (
        (128, "micro=1", "none"),
        (384, "micro=1", "block"),
        (512, "rows=1", "operator"),
        (1024, "rows=1", "none"),
        (2048, "rows=1", "none"),
        (768, "micro=1", "operator"),
    ),
    2: (
        (128, "tp=1,cp=1,engine=fsdp2,gather=block", "none"),
        (384, "tp=1,cp=1,engine=fsdp2,gather=step", "block"),
        (512, "tp=2,engine=fsdp2", "none"),
        (1024, "cp=2,engine=fsdp2", "none"),
        (512, "cp=2,attention=ring,engine=fsdp2", "none"),
        (768, "tp=1,cp=1,engine=deepspeed,zero=2", "operator"),
    ),
}
"""Lengths, layouts and recompute rules that are predicted, then run, by the number of ranks. (The
clock times pipelines, and other programs lengthen its seconds: none is here.)"""
LIMIT = 0.15
LOOP_WIDTH, LOOP_PRODUCTS = 512, 60


@dataclass
class HeldOut:
    """A layout that calibrates nothing, with its predictions and measurements by turn."""

    name: str
    plan: LayoutPlan
    file: Path
    length: int
    tokens: int
    seconds: list[float] = field(default_factory=list)
    profiled: list[float] = field(default_factory=list)
    """Seconds by the profile alone, relative to the measured ones."""
    tuned: list[float] = field(default_factory=list)
    """The same by the turn's tuned file."""
    memory: float = 0.0
    """Predicted bytes, relative to the measured ones."""

    def trial(self, folder: Path) -> LayoutTrial:
        return LayoutTrial(
            plan=self.plan,
            file=self.file,
            folder=folder,
            steps=STEPS,
            seq_len=self.length,
            batch_tokens=self.tokens,
        )


class Experiment:
    """The turns with a number of ranks, in a folder."""

    def __init__(self, root: Path, hardware: Hardware, ranks: int) -> None:
        self.root, self.hardware, self.ranks = root, hardware, ranks
        self.pricer = PlanPricer(
            load_model_config(MODEL), replace(RunConfig(), precision="fp32", device="cpu")
        )
        self.plan = self._plan()
        self.runner = ProcessRunner(("--model", MODEL, "threads=1"))
        self.layouts = [
            self._choose(number, *row) for number, row in enumerate(HELD_OUT[ranks], start=1)
        ]

    def take_turn(self, turn: int) -> None:
        """Tune, then run the held-out layouts; the figures join those of earlier turns."""
        request = tuning.TuneRequest(
            plan=self.plan,
            plan_file="plan.yaml",
            pricer=self.pricer,
            hardware=self.hardware,
            memory=0.9,
            trials=TRIALS,
            steps=STEPS,
            words=self.runner.arguments,
        )
        folder = TuneFolder(self.root / f"tune-{turn}")
        outcome = tuning.tune(request, folder, self.runner)
        lines = [line for line in tuning.format_lines(outcome) if not line.startswith("written")]
        print("\n".join(f"tune {turn}: {line}" for line in lines), flush=True)
        tuned = Hardware.load(folder.hardware)
        results = TuneFolder(self.root / f"held-out-{turn}")
        for number, layout in enumerate(self.layouts):
            trial = layout.trial
            result = results.once(
                f"{number:02}", lambda place, trial=trial: self.runner(trial(place))
            )
            if result.seconds is None or result.memory is None:
                raise SystemExit(f"{layout.name}: {result}")
            price = partial(
                self.pricer.price,
                layout.plan,
                seq_len=layout.length,
                batch_tokens=layout.tokens,
            )
            layout.seconds.append(result.seconds)
            layout.profiled.append(price(self.hardware)[0] / result.seconds)
            seconds, size = price(tuned)
            layout.tuned.append(seconds / result.seconds)
            layout.memory = size / result.memory

    def summarize(self) -> None:
        """Print the medians of all turns."""
        for layout in self.layouts:
            median = statistics.median(layout.tuned)
            print(
                f"held out: {layout.name}: {statistics.median(layout.seconds):.4f} CPU s a step; "
                f"by the profile alone {statistics.median(layout.profiled):.2f}, tuned "
                f"{median:.2f} ({min(layout.tuned):.2f} to {max(layout.tuned):.2f}); "
                f"memory {layout.memory:.2f}"
            )
        errors = [statistics.median(layout.tuned) - 1 for layout in self.layouts]
        single = [abs(ratio - 1) for layout in self.layouts for ratio in layout.tuned]
        worst = max(errors, key=abs)
        near = sum(abs(error) <= LIMIT for error in errors)
        print(
            f"held out, {self.ranks} rank{'s' * (self.ranks > 1)}: {near} of {len(errors)} within "
            f"{LIMIT:.0%}, worst {worst:+.1%}; of single runs "
            f"{sum(error <= LIMIT for error in single)} of {len(single)}",
            flush=True,
        )

    def _plan(self) -> LayoutPlan:
        file = self.root / "plan.yaml"
        if not file.exists():
            phases = [
                replace(
                    uniform_phase(length, batch(length, self.ranks) // length), name=f"of{length}"
                )
                for length in LENGTHS
            ]
            request = PlanRequest(
                model=self.pricer.model,
                run=self.pricer.run,
                hardware=self.hardware,
                gpus=self.ranks,
                phases=phases,
            )
            write(file, reader.dump(make_plans(request).best))
        return load_plan(file)

    def _choose(self, number: int, length: int, words: str, rule: Rule) -> HeldOut:
        """Return the best layout with these settings, under one recompute rule."""
        file, tokens = self.root / f"layout-{number}.yaml", batch(length, self.ranks)
        if not file.exists():
            costs = self.pricer.costs(self.hardware, length, tokens)
            budget = self.hardware.usable_memory * 0.9
            settings = parse_settings(words)
            outcome = search(costs, self.ranks, budget, settings=settings, num_best=1)
            if not outcome.candidates:
                raise SystemExit(f"no layout of {self.ranks} ranks with {words}, rows of {length}")
            best = outcome.candidates[0]
            plan = build_layout_plan([costs], {costs.phase.name: best.solution.price}, best)
            layers = tuple(replace(span, recompute=rule) for span in plan.layers)
            write(file, reader.dump(replace(plan, layers=layers)))
        name = f"rows of {length:>4}, {words}, recompute {rule}"
        return HeldOut(name, load_plan(file), file, length, tokens)


def batch(length: int, ranks: int) -> int:
    """Return the tokens of a step."""
    return BATCH // length * length * ranks


def time_loop() -> float:
    """Return the CPU seconds of a loop of products on one thread."""
    torch.set_num_threads(1)
    matrix = torch.ones(LOOP_WIDTH, LOOP_WIDTH)
    start = time.process_time()
    for _ in range(LOOP_PRODUCTS):
        matrix @ matrix
    return time.process_time() - start


def trainer(*words: object) -> None:
    command = [sys.executable, "-m", "headrace.trainer.cli", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main(root: Path, turns: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    file = root / "cpu.yaml"
    if not (root / "profiled").exists():
        for links in ([], ["--links"]):
            trainer("profile", "--device", "cpu", "--processes", 2, "--out", file, *links)
        write(root / "profiled", "")
    hardware = Hardware.load(file)
    experiments = [Experiment(root / f"ranks-{ranks}", hardware, ranks) for ranks in HELD_OUT]
    loops = [time_loop()]
    for turn in range(1, turns + 1):
        for experiment in experiments:
            experiment.take_turn(turn)
            loops.append(time_loop())
    for experiment in experiments:
        experiment.summarize()
    quickest = min(loops)
    print(
        f"load: a loop of products took {statistics.median(loops) / quickest:.2f} (median) and "
        f"{max(loops) / quickest:.2f} (worst) times its quickest CPU seconds; load average "
        f"{os.getloadavg()[2]:.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    num_turns = int(sys.argv[2]) if len(sys.argv) > 2 else TURNS
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), num_turns)
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place), num_turns)
