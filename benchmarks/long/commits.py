"""A training run at two commits: its collectives and the CPU time of its steps, side by side.

    python -m benchmarks.long.commits 8e5b2f2                      a commit and the working tree
    python -m benchmarks.long.commits A B --layouts one tp2        two commits

The runs are cases of the golden runs (docs/golden.md), whose `make regress A=… B=…` compares
losses. Each tree trains by its own `trainer run`, each rank under a count of the collectives that
its main thread calls. Figures are differences between a long run and a short one, so that the start
does not count. CPU seconds are summed over the ranks and measured without counting; the commits run
in turn, and the line has the median of the ratios, with their quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.golden import corpus
from benchmarks.golden.cases import LAYOUTS, Case, choose
from benchmarks.golden.trees import OWN_VARIABLES, STOPPED, Workshop, checkout, working_tree

SCRIPT = Path(__file__).parents[1] / "_collectives.py"
SHORT, COUNTED, TIMED = 2, 6, 42
"""Steps of the short run, and of the long runs."""
DEFAULT = ("one", "tp2", "cp2", "fsdp2")


def run(shop: Workshop, case: Case, measurement: str, steps: int) -> dict[str, Any]:
    """Train the first steps of a case. Return collectives or CPU seconds, summed over the ranks."""
    ranks = LAYOUTS[case.layout].processes
    mixture = shop.folder / "mixture.yaml"
    mixture.write_text(corpus.mixture(case.length))
    module, _, function = shop.scripts["trainer"].partition(":")
    with tempfile.TemporaryDirectory(dir=shop.folder) as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        words = ["run", "--mixture", str(mixture), "--out", f"{folder}/run"]
        words += ["--stop-after", str(steps), *case.words(), "threads=1"]
        processes = []
        for rank in range(ranks):
            command = [sys.executable, str(SCRIPT), measurement, f"{folder}/{rank}.json"]
            kept = (name for name in os.environ if not name.startswith(OWN_VARIABLES))
            environment = {name: os.environ[name] for name in kept}
            environment |= {"PYTHONPATH": str(shop.tree.root / ".root"), "OMP_NUM_THREADS": "1"}
            environment |= {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                subprocess.Popen(
                    [*command, module, function, *words],
                    cwd=shop.folder,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in processes:
            errors = process.communicate()[1]
            if process.returncode not in (STOPPED, 0):  # rank 0 alone says that it stopped early
                raise SystemExit(f"{case} failed in {shop.tree.commit}:\n{errors[-3000:]}")
        result = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return {
        "calls": sum((Counter(item["calls"]) for item in result), Counter()),
        "bytes": sum((Counter(item["bytes"]) for item in result), Counter()),
        "cpu": sum(item["cpu"] for item in result),
    }


def collectives(shop: Workshop, case: Case) -> dict[str, tuple[float, float]]:
    """Return calls and bytes of a step, over all ranks, by kind."""
    short, long = (run(shop, case, "count", steps) for steps in (SHORT, COUNTED))
    steps = COUNTED - SHORT

    def per_step(key: str, kind: str) -> float:
        return float(long[key][kind] - short[key][kind]) / steps

    return {
        kind: (per_step("calls", kind), per_step("bytes", kind)) for kind in sorted(long["calls"])
    }


def cpu_seconds(shop: Workshop, case: Case) -> float:
    short, long = (run(shop, case, "time", steps)["cpu"] for steps in (SHORT, TIMED))
    return float(long - short) / (TIMED - SHORT)


def words(collectives_by_kind: dict[str, tuple[float, float]]) -> str:
    return ", ".join(
        f"{calls:g} {kind} {size:,.0f} B" for kind, (calls, size) in collectives_by_kind.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--model", default="tiny-hybrid")
    parser.add_argument("--layouts", nargs="+", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        trees = [stack.enter_context(checkout(asked.before))]
        trees.append(stack.enter_context(checkout(asked.after)) if asked.after else working_tree())
        shops = []
        for tree in trees:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="commits-"))
            shops.append(Workshop(tree, Path(folder)))
            shops[-1].prepare()
        names = [f"{tree.commit[:7]}{'+' * tree.commit.endswith('+')}" for tree in trees]
        for case in choose("short", [asked.model], asked.layouts):
            before, after = (collectives(shop, case) for shop in shops)
            verdict = "the same" if before == after else "other"
            compared = f"{case}, {names[1]} and {names[0]}"
            print(f"{compared}: {verdict} collectives in a step: {words(after)}", flush=True)
            if before != after:
                print(f"    {names[0]}: {words(before)}", flush=True)
            pairs = []
            for number in range(asked.rounds):
                taken = {shop: cpu_seconds(shop, case) for shop in shops[:: (-1) ** number]}
                pairs.append([taken[shop] for shop in shops])
            low, middle, high = quantiles([new / old for old, new in pairs], n=4)
            old, new = (median(column) for column in zip(*pairs, strict=True))
            print(
                f"{compared}: {middle:.3f}x the CPU time of a step ({low:.3f} to {high:.3f}; "
                f"{1e3 * new:.1f} and {1e3 * old:.1f} ms)",
                flush=True,
            )


if __name__ == "__main__":
    main()
