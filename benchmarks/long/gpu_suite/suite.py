"""The run of the parts, one after the other, until the time is up."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.long._tasks import Report, circumstances, failed, run_all
from benchmarks.long._tasks import unfinished as find_missing

from .install import PROGRAMS
from .parts import PARTS, SLOWER, Settings, describe
from .summary import summarize

RESULTS = "results.txt"


class CopiedReport(Report):
    """A report that is also kept in a second file, for the next call on the same machine."""

    def __init__(self, file: Path, copy: Path, again: list[str]) -> None:
        super().__init__(file, resumed=True, again=again)
        self.copy = copy
        shutil.copyfile(file, copy)

    def __call__(self, line: str) -> None:
        super().__call__(line)
        with self.copy.open("a") as copy:
            copy.write(f"{line}\n")


def run(options: argparse.Namespace, began: float) -> int:
    """Run the parts until `--minutes` after `began`. Return the exit code."""
    import torch

    dry = options.command == "dry"
    if not dry and not torch.cuda.is_available():
        print("no GPU found: nothing was checked or measured (try dry)", file=sys.stderr)
        return 1
    until = time.monotonic() + 60 * options.minutes - (time.time() - began)
    folders = (options.bundle, options.work, options.out)
    settings = Settings(*(folder.resolve() for folder in folders), dry)
    settings.out.mkdir(parents=True, exist_ok=True)
    results, kept = settings.out / RESULTS, settings.work / RESULTS
    earlier = [file for file in (options.after, kept) if file and file.exists()]
    if not results.exists():
        shutil.copyfile(earlier[0], results) if earlier else results.touch()
    report = CopiedReport(results, kept, [options.again or ""])
    for line in (*circumstances(dry), *describe(), ""):
        report(line)
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    tasks = {part.name: part.list_tasks(settings) for part in chosen}
    for part in chosen:
        if not find_missing(tasks[part.name], report):
            continue
        start = time.monotonic()
        run_all(tasks[part.name], report, min(until, start + part.seconds * (SLOWER if dry else 1)))
        report(f"part {part.name} took {time.monotonic() - start:.0f} s of {part.seconds}")
    everything = [task for part in chosen for task in tasks[part.name]]
    run_all(everything, report, until)  # what a part's time did not allow
    for line in (*summarize(report, everything, settings.bundle), *_list_compiled(settings)):
        report(line)
    if failed(everything, report):
        return 1
    return 3 if find_missing(everything, report) else 0


def _list_compiled(settings: Settings) -> Iterator[str]:
    """Yield the programs that did not travel: this machine's Triton has compiled them."""
    import tarfile

    with tarfile.open(settings.bundle / PROGRAMS) as archive:
        carried = {name.partition(".")[0] for name in archive.getnames()}
    names: dict[str, int] = {}
    for binary in (settings.work / "triton").glob("*/*.cubin"):
        if binary.parent.name not in carried:
            names[binary.stem] = names.get(binary.stem, 0) + 1
    ours = {name: count for name, count in names.items() if not name.startswith("triton_")}
    yield f"{sum(ours.values())} programs did not travel, and were compiled there: " + json.dumps(
        ours
    )
