"""Everything to run on a first GPU, in four parts of at most nine minutes.

    python -m benchmarks.long.gpu_suite --predict --out DIR     what `trainer plan` predicts
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
from dataclasses import replace
from fnmatch import fnmatch
from importlib.util import find_spec
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
SLOWER = 5
"""Factor of the time limits of tasks in a dry run."""
SECOND = ("gated_rms_norm", "fft_convolution", "ssd", "selective_scan")
"""Kernels of the second half of the times: those of Mamba and of free filters."""
SPILLING = ("modal", "ssd", "short_convolution", "toeplitz")
"""Kernels whose backward pass ncu looks at: it spills registers, or nearly."""
GOALS = (
    ("transformer-1b", 0.52),
    ("transformer-1b, one document", 0.54),
    ("hybrid-1b", 0.52),
    ("mamba2-1.3b", 0.42),
)
"""MFU to reach on an H100."""
FIX = "Fix this first: speed is not to be measured before."


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, nargs="+", choices=PARTS, default=[])
    parser.add_argument(
        "--predict",
        action="store_true",
        help="write the predictions of `trainer plan`, for part 2 to compare with",
    )
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

    if options.predict:
        return write_predictions(options.out)
    if not (options.dry or torch.cuda.is_available()):
        print("no GPU found: nothing was checked or measured (try --dry)", file=sys.stderr)
        return 1
    if options.dry and find_spec("numpy") is None:
        print("numpy not found: Triton's interpreter, for a dry run, needs it", file=sys.stderr)
        return 1
    stop_with_tasks()
    options.out.mkdir(parents=True, exist_ok=True)
    worst = 0
    for part in options.part:
        worst = max(worst, run_part(part, options), key=(0, TIME_IS_UP, 1).index)
    return worst


def write_predictions(folder: Path) -> int:
    """Append predictions to part 2's lines. Return 1 if the planner makes none of a line."""
    from benchmarks.long._gpu_lines import predictable
    from benchmarks.long._gpu_predictions import HARDWARE, predict, prediction_name
    from benchmarks.long._tasks import FAILURES, Report, circumstances

    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder / "part-2.txt", resumed=True, again=[])
    for line in circumstances(True):
        report(line)
    texts = []
    for hardware in HARDWARE:
        for line in predictable():
            texts.append(predict(line, hardware))
            report(f"{prediction_name(line, hardware)}: {texts[-1]}")
    return int(any(text.startswith(FAILURES) for text in texts))


def run_part(part: int, options: argparse.Namespace) -> int:
    """Run a part until its end or its limit. Return the exit code."""
    from benchmarks.long._tasks import Report, circumstances, failed, run_all, unfinished

    until = time.monotonic() + options.limit
    first = Report(options.out / "part-1.txt", resumed=True)
    if part in (2, 3) and (wrong := failed(tasks(1, options), first)):
        print(f"part 1 has wrong results: {'; '.join(wrong)}. {FIX}", file=sys.stderr)
        return 1
    report = Report(options.out / f"part-{part}.txt", resumed=True, again=[options.again or ""])
    for line in circumstances(options.dry):
        report(line)
    work = tasks(part, options)
    chosen = [task for task in work if fnmatch(task.name, options.only or "*")]
    if part in (2, 3) and unfinished(tasks(1, options), first):
        report("part 1 is not complete: these kernels are not checked")
    run_all(chosen, report, until)
    if part == 2:
        for line in summary(report):
            report(line)
    wrong, missing = failed(chosen, report), unfinished(chosen, report)
    report(f"part {part}: {len(wrong)} results failed{': ' * bool(wrong)}{'; '.join(wrong)}")
    if wrong and part == 1:
        report(FIX)
    if missing:
        report(f"part {part}: the time is up, {len(missing)} results are missing: run it again")
    return 1 if wrong else TIME_IS_UP if missing else 0


def tasks(part: int, options: argparse.Namespace) -> list[Task]:
    """Return the tasks of a part, in order."""
    parts = {1: checks, 2: training, 3: times, 4: limits}
    slower = SLOWER if options.dry else 1
    return [replace(task, limit=slower * task.limit) for task in parts[part](options)]


def task_of(options: argparse.Namespace, name: str, *words: str, limit: float = 120) -> Task:
    from benchmarks.long._tasks import Task

    return Task(name, (TASK, *("--dry",) * options.dry, *words), limit)


def of_kernels(options: argparse.Namespace, part: str, limit: float) -> list[Task]:
    from benchmarks.long import kernels

    return kernels.tasks([part], [], options.dry, limit)


def checks(options: argparse.Namespace) -> list[Task]:
    """Return rates, one step beside plain torch, and the checks of all kernels."""
    return [
        task_of(options, "rates", "rates"),
        task_of(options, "smoke", "smoke", limit=240),
        *of_kernels(options, "checks", 300),
    ]


def training(options: argparse.Namespace) -> list[Task]:
    """Return the lines of gpu_step with its peers, in one process."""
    from benchmarks.long._gpu_lines import lines
    from benchmarks.long._gpu_peers import PEERS

    first = [line.name for line in lines() if replace(line, packed=True).is_first]
    others = [line.name for line in lines() if line.name not in first]
    return [steps(options, "training", (*first, *PEERS, *others))]


def steps(options: argparse.Namespace, name: str, names: tuple[str, ...]) -> Task:
    """Return the task of these lines of gpu_step."""
    from benchmarks.long._tasks import Task

    flags = ("--dry",) * options.dry
    command = (STEP, *flags, "--traces", str(options.out / "traces"))
    return Task(name, command, limit=180, items=names)


def times(options: argparse.Namespace) -> list[Task]:
    """Return the times of kernels, in two halves, and their backward passes under ncu."""
    work = of_kernels(options, "times", 150)
    halves = sorted(work, key=lambda task: task.name.split()[1] in SECOND)
    return [*halves, *(task_of(options, f"ncu {name}", "ncu", name) for name in SPILLING)]


def limits(options: argparse.Namespace) -> list[Task]:
    from benchmarks.long._gpu_lines import lines
    from headrace.models.kernels import KERNELS

    order = sorted(KERNELS, key=lambda name: name not in SPILLING)
    return [
        task_of(options, "attention", "attention"),
        task_of(options, "fp8 products", "fp8"),
        # A new process finds what part 2 compiled, if the machine is the same.
        steps(options, "compiled again", tuple(line.name for line in lines() if line.compiled)),
        *of_kernels(options, "limits", 150),
        *(
            task_of(options, f"{tool} {name}", "sanitizer", tool, name)
            for tool in ("memcheck", "racecheck")
            for name in order
        ),
    ]


def summary(report: Report) -> Iterator[str]:
    """Yield the goals, and tokens/s beside predictions, rows of one document, and peers."""
    from benchmarks.long._gpu_lines import lines, predictable
    from benchmarks.long._gpu_peers import PEERS
    from benchmarks.long._gpu_predictions import HARDWARE, prediction_name

    ours = [line.name for line in lines()]
    predictions = [
        (line.name, prediction_name(line, hardware))
        for line in predictable()
        for hardware in HARDWARE
    ]
    rates, used = {}, {}
    for name in (*ours, *PEERS, *(prediction for _, prediction in predictions)):
        figures = re.match(r"([\d,.]+) tokens/s(?:, MFU ([\d.]+))?", report.result(name) or "")
        if figures is not None:
            rates[name] = float(figures[1].replace(",", ""))
            used[name] = float(figures[2] or 0)
    for name, wanted in GOALS:
        reached = "not measured"
        if used.get(name):
            reached = f"{used[name]:.3f}, {'reached' if used[name] >= wanted else 'missed'}"
        yield f"goal of {name}, MFU {wanted:.2f}: {reached}"
    pairs = predictions + [
        (model, f"{model}, one document") for model in ("hybrid-1b", "transformer-1b")
    ]
    pairs += [(peer.split(",")[0].removeprefix("peer of "), peer) for peer in PEERS]
    pairs += [("hybrid-1b", peer) for peer in PEERS if "transformer-1b" in peer]
    for name, other in pairs:
        if name in rates and other in rates:
            yield f"{name} at {rates[name] / rates[other]:.2f}x the tokens/s of {other}"


if __name__ == "__main__":
    # headrace, if it is not installed, the cases of the kernels, and the benchmarks
    sys.path[:0] = [str(ROOT / ".root"), str(ROOT / "tests"), str(ROOT)]
    sys.exit(main())
