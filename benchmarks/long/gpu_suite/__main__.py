"""A quarter of an hour on a GPU: prepared here, run there, in one command each.

    python -m benchmarks.long.gpu_suite bundle BUNDLE            here: make what travels
    python -m benchmarks.long.gpu_suite dry BUNDLE --out OUT     here: all of it, tiny, on a CPU
    python -m benchmarks.long.gpu_suite run BUNDLE --out OUT     there: until --minutes are over
    python -m benchmarks.long.gpu_suite parts                    its parts and their seconds

The device needs Python, pip, torch, Triton and what `bundle.PACKAGES` says; headrace and its other
requirements travel. Each task is a process with its own time limit, and each line is appended to
OUT/results.txt as it comes. The same command continues behind the results in OUT, in --work, or in
the file of --after. Its last lines fit a screen.

Exit codes: 0 all is measured; 1 a result is wrong or failed; 3 the time is up, run it again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from . import install

MINUTES = 9.4
TIME_IS_UP = 3
INSTALLED = "HEADRACE_SUITE_INSTALLED"
"""Environment variable of the second stage, in which the bundle's modules can be imported."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("bundle", help="make what travels")
    making.add_argument("bundle", type=Path)
    making.add_argument("--cache", type=Path, help="Triton's cache of the programs [BUNDLE-cache]")
    making.add_argument("--python", default="3.12", help="version of the device's Python")
    making.add_argument("--only", nargs="+", default=[], help="wheels data predictions losses …")
    for command in ("run", "dry"):
        running = commands.add_parser(command)
        running.add_argument("bundle", type=Path)
        running.add_argument("--out", type=Path, required=True, help="folder of the results")
        running.add_argument("--work", type=Path, default=Path("/tmp/headrace-suite"))
        running.add_argument("--minutes", type=float, default=120 if command == "dry" else MINUTES)
        running.add_argument("--after", type=Path, help="results.txt of an earlier call")
        running.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
        running.add_argument("--again", metavar="PATTERN", help="results to repeat, by name")
    commands.add_parser("parts", help="the parts, and the seconds of each")
    options = parser.parse_args(words)
    if options.command == "bundle":
        from .bundle import make_bundle

        cache = options.cache or options.bundle.with_name(f"{options.bundle.name}-cache")
        return make_bundle(options.bundle, cache, options.python, options.only)
    if options.command == "parts":
        from .parts import describe

        print("\n".join(describe()))
        return 0
    if os.environ.get(INSTALLED) is None:
        begin(options, list(sys.argv[1:] if words is None else words))
    from benchmarks.long._tasks import stop_with_tasks

    from .suite import run

    stop_with_tasks()
    return run(options, float(os.environ[INSTALLED]))


def begin(options: argparse.Namespace, words: list[str]) -> NoReturn:
    """Install the bundle, and become a process that can import it."""
    began = time.time()
    bundle, work = options.bundle.resolve(), options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        installed = install.install(bundle, work, options.command == "dry")
    except RuntimeError as error:
        sys.exit(f"{error}")
    print(f"installed in {time.time() - began:.0f} s: {installed}", flush=True)
    variables = {**install.environment(work), INSTALLED: str(began)}
    os.execve(sys.executable, [sys.executable, "-m", __package__ or "", *words], variables)


if __name__ == "__main__":
    sys.exit(main())
