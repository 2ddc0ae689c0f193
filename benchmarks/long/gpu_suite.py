"""Everything to run on a first GPU, in four parts of at most nine minutes.

    python -m benchmarks.long.gpu_suite --predict --out DIR     predictions; needs no GPU
    python -m benchmarks.long.gpu_suite --part 1 --out DIR      rates, one step, all kernel checks
    python -m benchmarks.long.gpu_suite --part 2 --out DIR      training: gpu_step, with peers
    python -m benchmarks.long.gpu_suite --part 3 --out DIR      times of kernels, ncu
    python -m benchmarks.long.gpu_suite --part 4 --out DIR      limits, sanitizer, attention, fp8
    python -m benchmarks.long.gpu_suite --dry --part 1 2 3 4 --out DIR    the same on a CPU, tiny

A part needs torch and Triton; peers and tools are used where they are installed. Each task is a
process with its own time limit, and each line is appended to DIR/part-N.txt as it comes. When the
part's time is up, or it is killed, the same command continues behind the results in the file. What
failed is a result too: `--again 'checks modal*'` repeats results by name; after a change of the
code, take a new folder.

Exit codes: 0 the part is complete; 1 a result is wrong or failed; 2 misuse; 3 the time is up, run
the part again. Where part 1 has a wrong result, parts 2 and 3 do not begin: speed is not to be
measured before it is fixed.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]

if TYPE_CHECKING:
    from benchmarks.long._tasks import Report, Task

HERE = Path(__file__).parent
STEP, KERNELS, TASK = (str(HERE / name) for name in ("gpu_step.py", "kernels.py", "_gpu_task.py"))
PARTS = (1, 2, 3, 4)
LIMIT = 540.0
TIME_IS_UP = 3
SECOND = ("gated_rms_norm", "fft_convolution", "ssd", "selective_scan")
"""Kernels of the second half of the times: those of Mamba and of free filters."""
SPILLING = ("modal", "ssd", "short_convolution", "toeplitz")
"""Kernels whose backward pass ncu looks at: it spills registers, or nearly."""
GOALS = (
    ("transformer-1b", 0.50),
    ("transformer-1b, one document", 0.50),
    ("hybrid-1b", 0.45),
)
"""MFU to reach."""
FIX = "Fix this first: speed is not to be measured before."


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, nargs="+", choices=PARTS, default=[])
    parser.add_argument("--predict", action="store_true", help="write part 2's predictions alone")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a part (540)")
    parser.add_argument("--only", metavar="PATTERN", help="tasks by name")
    parser.add_argument("--again", metavar="PATTERN", help="results to repeat, by name")
    options = parser.parse_args(words)
    if options.predict == bool(options.part):
        parser.error("give either --part or --predict")
    import torch

    from benchmarks.long._tasks import stop_with_tasks

    if not (options.dry or options.predict or torch.cuda.is_available()):
        print("no GPU found: nothing was checked or measured (try --dry)", file=sys.stderr)
        return 1
    stop_with_tasks()
    options.out.mkdir(parents=True, exist_ok=True)
    worst = 0
    for part in options.part or [2]:
        code = run_part(part, options)
        worst = code if worst != 1 else 1
    return worst


def run_part(part: int, options: argparse.Namespace) -> int:
    """Run a part until its end or its limit. Return the exit code."""
    from benchmarks.long._tasks import Report, circumstances, failed, run_all, unfinished

    until = time.monotonic() + options.limit
    first = Report(options.out / "part-1.txt", resumed=True)
    if part in (2, 3) and not options.predict and (wrong := failed(tasks(1, options), first)):
        print(f"part 1 has wrong results: {', '.join(wrong)}. {FIX}", file=sys.stderr)
        return 1
    report = Report(options.out / f"part-{part}.txt", resumed=True, again=[options.again or ""])
    for line in circumstances(options.dry or options.predict):
        report(line)
    work = tasks(part, options)
    chosen = [task for task in work if fnmatch(task.name, options.only or "*")]
    if options.predict:
        chosen = work[:1]
    elif part in (2, 3) and unfinished(tasks(1, options), first):
        report("part 1 is not complete: these kernels are not checked")
    run_all(chosen, report, until)
    if part == 2 and not options.predict:
        for line in summary(report):
            report(line)
    wrong, missing = failed(chosen, report), unfinished(chosen, report)
    report(f"part {part}: {len(wrong)} failed{', ' * bool(wrong)}{', '.join(wrong)}")
    if wrong and part == 1:
        report(FIX)
    if missing:
        report(f"part {part}: the time is up, {len(missing)} results are missing: run it again")
    return 1 if wrong else TIME_IS_UP if missing else 0


def tasks(part: int, options: argparse.Namespace) -> list[Task]:
    """Return the tasks of a part, in order."""
    from benchmarks.long import kernels
    from benchmarks.long._tasks import Task
    from headrace.models.kernels import KERNELS

    dry: bool = options.dry
    dtype, flag = "float32" if dry else "bfloat16", ("--dry",) * dry

    def task(name: str, *words: str, limit: float = 120) -> Task:
        return Task(name, (TASK, *flag, *words), limit)

    def of_kernels(part: str, limit: float) -> list[Task]:
        return [kernels.task_of(part, name, dtype, dry, limit) for name in KERNELS]

    if part == 1:
        checks = kernels.tasks(["checks"], [], dry, 300)
        return [task("rates", "rates"), task("smoke", "smoke", limit=240), *checks]
    if part == 2:
        return training(options.out, dry)
    if part == 3:
        times = sorted(of_kernels("times", 150), key=lambda each: each.name.split()[1] in SECOND)
        return [*times, *(task(f"ncu {name}", "ncu", name) for name in SPILLING)]
    order = sorted(KERNELS, key=lambda name: name not in SPILLING)
    return [
        task("attention", "attention"),
        task("fp8 products", "fp8"),
        recompiled(dry),
        *of_kernels("limits", 150),
        *(
            task(f"{tool} {name}", "sanitizer", tool, name)
            for tool in ("memcheck", "racecheck")
            for name in order
        ),
    ]


def training(out: Path, dry: bool) -> list[Task]:
    """Return the predictions, and the lines of gpu_step with its peers, in one process."""
    from benchmarks.long._gpu_lines import lines, predictable
    from benchmarks.long._gpu_peers import PEERS
    from benchmarks.long._gpu_task import PREDICTION
    from benchmarks.long._tasks import Task

    flag = ("--dry",) * dry
    predictions = Task(
        "predictions",
        (TASK, *flag, "predictions"),
        limit=180,
        items=tuple(f"{PREDICTION}{line.name}" for line in predictable()),
        environment={"CUDA_VISIBLE_DEVICES": ""},  # they count on a device that does not exist
    )
    ours = [line.name for line in lines()]
    first = ours[: len(ours) // 3]
    steps = Task(
        "training",
        (STEP, *flag, "--traces", str(out / "traces")),
        limit=150,
        items=(*first, *PEERS, *ours[len(first) :]),
    )
    return [predictions, steps]


def recompiled(dry: bool) -> Task:
    """Return the compiled lines once more: a new process finds what part 2 compiled."""
    from benchmarks.long._gpu_lines import lines
    from benchmarks.long._tasks import Task

    names = tuple(line.name for line in lines() if line.compiled)
    return Task("compiled before", (STEP, *("--dry",) * dry), limit=150, items=names)


def summary(report: Report) -> Iterator[str]:
    """Yield the goals, and tokens/s beside predictions, rows of one document, and peers."""
    from benchmarks.long._gpu_lines import lines
    from benchmarks.long._gpu_peers import PEERS
    from benchmarks.long._gpu_task import PREDICTION

    ours = [line.name for line in lines()]
    rates, used = {}, {}
    for name in (*ours, *PEERS, *(f"{PREDICTION}{name}" for name in ours)):
        found = re.match(r"([\d,]+) tokens/s, MFU ([\d.]+|—)", report.result(name) or "")
        if found is not None:
            rates[name] = float(found[1].replace(",", ""))
            used[name] = 0.0 if found[2] == "—" else float(found[2])
    for name, wanted in GOALS:
        reached = "not measured"
        if used.get(name):
            reached = f"{used[name]:.3f}, {'reached' if used[name] >= wanted else 'missed'}"
        yield f"goal of {name}, MFU {wanted:.2f}: {reached}"
    pairs = [(name, f"{PREDICTION}{name}") for name in ours]
    pairs += [(model, f"{model}, one document") for model in ("hybrid-1b", "transformer-1b")]
    pairs += [(peer.split(",")[0].removeprefix("peer of "), peer) for peer in PEERS]
    pairs += [("hybrid-1b", peer) for peer in PEERS if "transformer-1b" in peer]
    for name, other in pairs:
        if name in rates and other in rates:
            yield f"{name} at {rates[name] / rates[other]:.2f}x the tokens/s of {other}"


if __name__ == "__main__":
    # headrace, if it is not installed, the cases of the kernels, and the benchmarks
    sys.path[:0] = [str(ROOT / ".root"), str(ROOT / "tests"), str(ROOT)]
    sys.exit(main())
