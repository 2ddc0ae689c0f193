"""Time, CPU time and memory of commands that compute little: they should cost little more than what
they import.

`--help` beside the bare interpreter; the first step of a run beside one import of torch and the
engine; a model's counts, a dry run and scores of ten questions beside `import torch`, at their
first call and at a later one, which finds what the first has stored.

python -m benchmarks.startup
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

LIMIT = 0.5
RUNS, LONG_RUNS = 15, 3
COMMANDS = ("trainer", "tokenize", "mixtures", "headrace")
BIN = Path(sys.executable).parent
ENGINES = {"FSDP2": "fsdp2.Fsdp2Config", "DeepSpeed ZeRO-1": "deepspeed.DeepSpeedConfig"}
IMPORT = """
import headrace.trainer.launch.worker
from headrace.trainer.engines.{} import {}
{}().load("cpu")
"""
SMALL = ["synthetic.seq_len=64", "synthetic.batch_rows=4", "watch.tensorboard=false", "threads=1"]
PLAN = """
seed: 1
sources: {text: {data: DATA}}
phases:
  all: {tokens: 2048, seq_len: 64, batch: 256, weights: {text: 1.0}}
"""
TASK = """
task: questions
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
TICKS = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    seconds: float
    cpu: float
    memory: float
    """Greatest resident memory of a process in MB."""

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s, {self.cpu:.2f} s of CPU, {self.memory:.0f} MB"

    def compare(self, limit: Cost, name: str) -> str:
        return (
            f"{self}; {self.seconds / limit.seconds:.2f} of the time and "
            f"{self.cpu / limit.cpu:.2f} of the CPU of {name} ({limit})"
        )


def cost_of(words: Sequence[str | Path], **variables: str) -> Cost:
    """Run a command, and return what it and its processes cost."""
    start = time.perf_counter()
    process = subprocess.Popen(
        list(map(str, words)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **variables},
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    seconds = time.perf_counter() - start
    return Cost(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def middle(costs: Sequence[Cost]) -> Cost:
    return Cost(*(median(column) for column in zip(*costs, strict=True)))


def first_step(out: Path, engine: str, processes: int) -> Cost:
    """Return the cost of a run up to the end of its first step, and end the run."""
    words = [BIN / "trainer", "run", "--out", out, "--processes", processes, *SMALL]
    words += [f"engine.kind={engine}", "synthetic.steps=1000000"]
    events = out / "events.jsonl"
    with subprocess.Popen(list(map(str, words)), stderr=subprocess.DEVNULL) as process:
        while not events.exists() or '"first step"' not in (text := events.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        cpu, memory = processes_of(process.pid)
        process.kill()
    event = next(e for e in map(json.loads, text.splitlines()) if e["event"] == "first step")
    return Cost(event["seconds"], cpu, memory)


def processes_of(command: int) -> tuple[float, float]:
    """Return the CPU time of a process and all below it, and the greatest resident memory."""
    parents, cpu = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(fields[1])
        cpu[int(folder.name)] = sum(map(int, fields[11:15])) / TICKS
    family = {command}
    while below := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= below
    peaks = [
        Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0] for pid in family
    ]
    return sum(cpu[pid] for pid in family), max(map(int, peaks)) / 1024


def help_pages() -> None:
    words = {name: [BIN / name, "--help"] for name in COMMANDS}
    words["python"] = [sys.executable, "-c", "pass"]
    for command in words.values():
        cost_of(command)  # fills the page cache
    costs: dict[str, list[Cost]] = {name: [] for name in words}
    for _ in range(RUNS):
        for name, command in words.items():
            costs[name].append(cost_of(command))
    bare = middle(costs.pop("python"))
    for name, runs in costs.items():
        cost = middle(runs)
        print(
            f"{name} --help: {cost.seconds:.3f} s, {cost.seconds / LIMIT:.2f} of the limit of "
            f"{LIMIT} s ({cost.cpu:.3f} s of CPU); {cost.seconds / bare.seconds:.1f} times "
            f"`python -c pass`, {bare.seconds:.3f} s ({bare.cpu:.3f} s of CPU)"
        )


def first_steps(folder: Path) -> None:
    for name, engine in ENGINES.items():
        module, kind = engine.split(".")
        program = [sys.executable, "-c", IMPORT.format(module, kind, kind)]
        imports: list[Cost] = []
        steps: dict[int, list[Cost]] = {1: [], 2: []}
        for run in range(LONG_RUNS):
            imports.append(cost_of(program, DS_ACCELERATOR="cpu"))
            for processes, costs in steps.items():
                out = folder / f"{module}-{processes}-{run}"
                costs.append(first_step(out, module, processes))
        limit = middle(imports)
        for processes, costs in steps.items():
            ranks = f"{processes} rank{'s' * (processes > 1)}"
            comparison = middle(costs).compare(limit, "one import of torch and the engine")
            print(f"first step, {name}, {ranks}: {comparison}")


def later_calls(folder: Path) -> None:
    scored, data = folder / "scored", folder / "data"
    (folder / "corpus.txt").write_text("the river carries water to the wheel\n" * 2000)
    cost_of(
        [BIN / "tokenize", "build", folder / "corpus.txt", "--tokenizer", "byte", "--out", data]
    )
    (folder / "mixture.yaml").write_text(PLAN.replace("DATA", str(data)))
    words = ["--model", "tiny-transformer", "--out", scored, "engine.kind=fsdp2", "threads=1"]
    cost_of([BIN / "trainer", "run", "--mixture", folder / "mixture.yaml", *words])
    questions = [
        {"question": "the river " * n, "choices": [" mill", " stone", " water"], "answer": n % 3}
        for n in range(1, 11)
    ]
    (folder / "tasks").mkdir()
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (folder / "tasks" / "questions.yaml").write_text(
        TASK.replace("FILE", str(folder / "questions.jsonl"))
    )
    tasks = ["--tasks", "questions", "--include-path", folder / "tasks"]
    commands = {
        "headrace models show tiny-hybrid": [BIN / "headrace", "models", "show", "tiny-hybrid"],
        "trainer run --dry-run": [
            *(BIN / "trainer", "run", "--out", folder / "dry", *SMALL, "--dry-run"),
            *("synthetic.steps=20", "--processes", 2),
        ],
        "trainer eval of ten questions": [BIN / "trainer", "eval", scored, *tasks],
    }
    torch: list[Cost] = []
    first: dict[str, list[Cost]] = {name: [] for name in commands}
    later: dict[str, list[Cost]] = {name: [] for name in commands}
    for run in range(LONG_RUNS):
        cache = str(folder / f"cache-{run}")
        torch.append(cost_of([sys.executable, "-c", "import torch"]))
        for calls in (first, later):
            for name, command in commands.items():
                calls[name].append(cost_of(command, XDG_CACHE_HOME=cache))
    for name in commands:
        for when, calls in (("the first time", first), ("again", later)):
            print(f"{name}, {when}: {middle(calls[name]).compare(middle(torch), '`import torch`')}")


def main() -> None:
    help_pages()
    with tempfile.TemporaryDirectory() as folder:
        first_steps(Path(folder))
        later_calls(Path(folder))


if __name__ == "__main__":
    main()
