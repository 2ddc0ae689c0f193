"""Time of `mixtures find`: 100,000 documents in ten runs of a million steps, by the product's
command, compared with its limit of a minute of CPU time.

    python -m benchmarks.find_documents [--documents 100000] [--runs 10] [--steps 1000000]

Each run draws from a small dataset with a million documents, a tenth of which are asked for by id,
beside a large one. A run here is a plan, a ledger and the names of its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.data.plan_data import write_head
from support.data.small_data import plan_of, write_dataset

LIMIT_SECONDS = 60.0
DOCUMENTS = 1_000_000
ROW_TOKENS, BATCH_ROWS = 256, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        lengths = rng.integers(20, 60, DOCUMENTS)
        tokens = rng.integers(1, 512, int(lengths.sum()), dtype=np.uint16)
        documents = np.split(tokens, np.cumsum(lengths)[:-1])
        small = str(folder / "small")
        write_dataset(small, documents, shard_documents=100_000)
        large = write_head(str(folder / "large"), 4 * 10**9)
        runs = [
            write_run(folder / f"run-{n}", n, small, large, options.steps)
            for n in range(options.runs)
        ]
        asked = folder / "ids.txt"
        numbers = rng.choice(DOCUMENTS, options.documents, replace=False)
        # The ids of a test's dataset count within a shard's batch of documents.
        asked.write_text("".join(f"id-{number}\n" for number in numbers.tolist()))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run(
            [
                *(sys.executable, "-m", "headrace.mixtures.cli", "find", *runs),
                *("--documents", str(asked), "--source", "small", "--json"),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    exposures = sum(
        len(json.loads(line).get("exposures", ())) for line in shown.stdout.splitlines()
    )
    print(
        f"{options.documents:,} documents in {options.runs} runs of {options.steps:,} steps: "
        f"{cpu:.1f} CPU s, {cpu / LIMIT_SECONDS:.2f} of the limit of {LIMIT_SECONDS:.0f} s; "
        f"{exposures:,} exposures, {after.ru_maxrss >> 10:,} MiB"
    )


def write_run(folder: Path, seed: int, small: str, large: str, steps: int) -> str:
    """Write a finished run: its plan and its ledger."""
    tokens = steps * BATCH_ROWS * ROW_TOKENS
    plan = plan_of(
        {
            "seed": seed,
            "sources": {
                "small": {"data": small, "max_epochs": 2},
                "large": {"data": large, "max_epochs": 2},
            },
            "phases": {
                "main": {
                    "tokens": tokens,
                    "seq_len": ROW_TOKENS,
                    "batch": BATCH_ROWS * ROW_TOKENS,
                    "weights": {"small": 0.02, "large": 0.98},
                }
            },
        }
    )
    folder.mkdir()
    plan.save(folder / "plan.json")
    with (folder / "ledger.jsonl").open("w") as file:
        for step in range(steps):
            row = step * BATCH_ROWS
            entry = {"step": step, "first_row": row, "rows": BATCH_ROWS, "hash": f"{step:032x}"}
            file.write(json.dumps(entry) + "\n")
    for step in range(10_000, steps + 1, 10_000):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    return str(folder)


if __name__ == "__main__":
    main()
