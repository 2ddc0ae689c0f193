"""Time and memory of the commands that read a run's documents, `mixtures summary`, `mixtures
prove`, `mixtures audit --rows --out` and `trainer documents`, on corpora of which one is larger.

    python -m benchmarks.provenance [--documents 400000 2000000]

A document has a URL of one of 100,000 hosts, a language and a date. A run here is a plan and a
ledger, with a line of losses for each step. Memory that grows by less than the corpus streams.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.data.small_data import plan_of

HOSTS = 100_000
ROW_TOKENS, BATCH_ROWS = 256, 32
PIECES = 8
"""Recorded losses of a step."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, nargs="+", default=[400_000, 2_000_000])
    options = parser.parse_args()
    measured: dict[str, list[tuple[int, float, int]]] = {}
    for documents in options.documents:
        with tempfile.TemporaryDirectory() as name:
            for command, (cpu, memory) in measure(Path(name), documents).items():
                measured.setdefault(command, []).append((documents, cpu, memory))
    for command, (first, *_, last) in measured.items():
        grown = last[2] / first[2]
        print(
            f"{command}: {last[0]:,} documents in {last[1]:.1f} CPU s, "
            f"{last[1] / last[0] * 1e6:.1f} a million; {last[2]:,} MiB, {grown:.2f} times those "
            f"of {first[0]:,} documents"
        )


def measure(folder: Path, documents: int) -> dict[str, tuple[float, int]]:
    """Return CPU seconds and MiB of each command."""
    write_corpus(folder / "corpus.parquet", documents)
    build = ("tokenize", "build", str(folder / "corpus.parquet"), "--tokenizer", "byte")
    fields = ("--id-field", "id", "--keep", "url,language,date")
    run_command(*build, *fields, "--out", str(folder / "web"), "--workers", "1")
    run = write_run(folder / "run", str(folder / "web"))
    rows = f"0:{BATCH_ROWS * 2000 * documents // 400_000}"
    proof = ("--document", "id-1234", "--step", "1", "--out", str(folder / "proof.json"))
    commands = {
        "mixtures summary": ("mixtures", "summary", run, "--out", str(folder / "summary.json")),
        "mixtures prove": ("mixtures", "prove", run, *proof),
        "mixtures audit --rows --out": (
            *("mixtures", "audit", run, "--rows", rows, "--out"),
            str(folder / "rows.parquet"),
        ),
        "trainer documents": ("trainer", "documents", run, "--worst", "50"),
    }
    return {name: run_command(*words) for name, words in commands.items()}


def write_corpus(file: Path, documents: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = np.random.default_rng(0)
    schema = pa.schema([(name, pa.string()) for name in ("id", "text", "url", "language", "date")])
    with pq.ParquetWriter(file, schema) as writer:
        for first in range(0, documents, 100_000):
            numbers = range(first, min(first + 100_000, documents))
            hosts = (HOSTS * draw.random(len(numbers)) ** 3).astype(int).tolist()
            columns = [
                [f"id-{number}" for number in numbers],
                [f"the wheel of mill {number} turns. " * 3 for number in numbers],
                [f"https://www.mill-{host}.example/{host % 97}" for host in hosts],
                [("en", "de", "fr")[host % 3] for host in hosts],
                [f"2025-{1 + host % 12:02}-01" for host in hosts],
            ]
            writer.write_table(pa.table(columns, schema=schema))


def write_run(folder: Path, data: str) -> str:
    """Write a run over most of a dataset, with its records."""
    tokens = json.loads((Path(data) / "manifest.json").read_text())["generations"][0]["tokens"]
    phase = {"seq_len": ROW_TOKENS, "batch": BATCH_ROWS * ROW_TOKENS, "weights": {"web": 1}}
    plan = plan_of(
        {
            "sources": {"web": {"data": data}},
            "phases": {"main": {"tokens": tokens * 9 // 10, **phase}},
        }
    )
    folder.mkdir()
    plan.save(folder / "plan.json")
    draw = np.random.default_rng(1)
    with (
        (folder / "ledger.jsonl").open("w") as ledger,
        (folder / "documents.jsonl").open("w") as losses,
        (folder / "metrics.jsonl").open("w") as metrics,
    ):
        for step in range(plan.end_step):
            first_row, rows = step * BATCH_ROWS, BATCH_ROWS
            entry = {"step": step, "first_row": first_row, "rows": rows, "hash": f"{step:032x}"}
            ledger.write(json.dumps(entry) + "\n")
            pieces = [
                [first_row + row, 0, 60 * loss, 60.0]
                for row, loss in enumerate(draw.normal(3, 1, PIECES).tolist())
            ]
            losses.write(json.dumps({"step": step, "loss": 24_000.0, "pieces": pieces}) + "\n")
            sources = {"web": {"loss": 3.0, "weight": 8000.0}}
            metrics.write(json.dumps({"step": step, "loss": 3.0, "sources": sources}) + "\n")
    return str(folder)


def run_command(program: str, *words: str) -> tuple[float, int]:
    """Run a command of headrace; returns its CPU seconds and its largest memory in MiB."""
    script = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss >> 10)\n"
    )
    command = [sys.executable, "-m", f"headrace.{program}.cli", *words]
    shown = subprocess.run(
        [sys.executable, "-c", script, *command], check=True, capture_output=True, text=True
    )
    cpu, memory = shown.stdout.split()
    return float(cpu), int(memory)


if __name__ == "__main__":
    main()
