"""Golden runs: record what the code computes, and compare later code with it.

python -m benchmarks.golden record            train all cases, write benchmarks/golden/*.json
python -m benchmarks.golden regress           train them again, compare with the recordings
python -m benchmarks.golden regress --a A --b B   train two commits, show them side by side

docs/golden.md describes the runs, the bounds, and how to renew a recording.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .bounds import limits_of
from .cases import FORMS, LAYOUTS, SHORT, THREADS, Case, GoldenError, choose
from .compare import difference, spread
from .recordings import FOLDER, Recording, circumstances
from .trees import Curve, Tree, Workshop, checkout, full_hash, working_tree

EQUAL, ROUNDING = "to the bit", "to rounding"


def record(asked: argparse.Namespace) -> int:
    form = "long" if asked.form == "long" else "short"
    cases = choose(form, asked.models, asked.layouts)
    recordings = {}
    for model in {case.model: None for case in cases}:
        recording = Recording(model, form, asked.recordings).load()
        chosen = {case.layout for case in cases if case.model == model}
        if set(recording.runs) <= chosen and not asked.missing:  # all are renewed
            recording = Recording(model, form, asked.recordings)
        recordings[model] = recording
    if asked.missing:
        cases = [
            case
            for case in cases
            if recordings[case.model].steps(case) < count_steps(form, asked.steps)
        ]
    failed = 0
    with tree_of(asked.a) as tree, workshop(tree, asked.threads) as shop:
        about = {"commit": tree.commit, "circumstances": circumstances(shop)}
        if tree.commit.endswith("+"):
            say("note: the working tree has changes that are not committed")
        steps = {case: count_steps(form, asked.steps) for case in cases}
        for case, curve, seconds in train(shop, steps, asked.jobs):
            recording = recordings[case.model]
            try:
                if isinstance(curve, GoldenError):
                    raise curve
                recording.put(case, curve, **about, data=shop.digest(case))
            except GoldenError as error:
                failed += 1
                say(f"FAILED  {case}: {error}")
                continue
            say(f"{case}: {len(curve.loss)} steps in {seconds:.0f} s → {recording.file.name}")
    return 1 if failed else 0


def regress(asked: argparse.Namespace) -> int:
    return side_by_side(asked) if asked.a or asked.b else against_recordings(asked)


def against_recordings(asked: argparse.Namespace) -> int:
    form = "long" if asked.form == "long" else "short"
    files: dict[str, Recording] = {}
    cases = choose(asked.form, asked.models, asked.layouts)
    for case in cases:
        if case.model not in files:
            files[case.model] = Recording(case.model, form, asked.recordings).load()
    missing = [case for case in cases if not files[case.model].steps(case)]
    if missing == cases:
        files[cases[0].model].check(cases[0])
    cases = [case for case in cases if case not in missing]
    failed = []
    with tree_of(None) as tree, workshop(tree, asked.threads) as shop:
        here = circumstances(shop)
        kept = {case: files[case.model].get(case, shop.digest(case)) for case in cases}
        steps = {
            case: min(count_steps(asked.form, asked.steps), len(kept[case].curve.loss))
            for case in cases
        }
        for case, curve, seconds in train(shop, steps, asked.jobs):
            if isinstance(curve, GoldenError):
                failed.append(case)
                say(f"FAILED  {case}: {curve}")
                continue
            recorded = kept[case]
            changed = [key for key in here if here[key] != recorded.circumstances.get(key)]
            exact = not changed and not asked.rounding
            result = difference(recorded.curve, curve, None if exact else limits_of(case))
            how = "to the bit" if exact else "within bounds"
            if not exact and changed:
                how += f" (other {', '.join(changed)})"
            if result is None:
                say(f"ok      {case}: {len(curve.loss)} steps equal {how}, {seconds:.0f} s")
                continue
            failed.append(case)
            say(f"FAILED  {case}: {result}; recorded from commit {recorded.commit[:12]}")
            say(f"        loss {spread(recorded.curve.loss, curve.loss)}")
            say(f"        gradient norm {spread(recorded.curve.norm, curve.norm)}")
            if exact and difference(recorded.curve, curve, limits_of(case)) is None:
                say("        The difference is within the bounds of rounding (ROUNDING=1).")
    if missing:
        say(f"not recorded: {', '.join(map(str, missing))} (`make golden MISSING=1` records them)")
    if failed:
        models = " ".join(dict.fromkeys(case.model for case in failed))
        say(
            f"{len(failed)} of {len(cases)} golden runs moved\n"
            "  hint: find the commit: `make regress A=<commit> B=<commit>`. If a change moves them "
            f"on purpose,\n  renew them in a commit of its own that says why: `make golden "
            f"MODELS='{models}'` (docs/golden.md)"
        )
        return 1
    say(f"{len(cases)} golden runs did not move")
    return 0


def side_by_side(asked: argparse.Namespace) -> int:
    """Train two trees and print a line for each case."""
    cases = choose(asked.form, asked.models, asked.layouts)
    for commit in filter(None, (asked.a, asked.b)):
        full_hash(commit)  # before the first is trained
    steps = {case: count_steps(asked.form, asked.steps) for case in cases}
    curves: list[dict[Case, Curve | GoldenError]] = []
    titles = []
    for commit in (asked.a, asked.b):
        with tree_of(commit) as tree, workshop(tree, asked.threads) as shop:
            titles.append(f"{commit or 'working tree'} ({tree.commit[:12]})")
            say(titles[-1])
            curves.append({})
            for case, curve, seconds in train(shop, steps, asked.jobs):
                curves[-1][case] = curve
                ended = "FAILED" if isinstance(curve, GoldenError) else f"loss {curve.loss[-1]}"
                say(f"  {case}: {seconds:.0f} s, {ended}")
    print(f"A {titles[0]}\nB {titles[1]}\n")
    rows = [("case", "ledger", "loss", "gradient norm", "verdict")]
    moved = 0
    for case in cases:
        a, b = (of_tree[case] for of_tree in curves)
        rows.append(compared(case, a, b))
        moved += rows[-1][-1] not in (EQUAL, ROUNDING)
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]))
    return 1 if moved else 0


def compared(case: Case, a: Curve | GoldenError, b: Curve | GoldenError) -> tuple[str, ...]:
    """Return a row of the table of `side_by_side`."""
    for name, curve in (("A", a), ("B", b)):
        if isinstance(curve, GoldenError):
            return str(case), "-", "-", "-", f"FAILED in {name}: {curve}"
    assert isinstance(a, Curve) and isinstance(b, Curve)
    result = difference(a, b, limits_of(case))
    verdict = EQUAL if a == b else ROUNDING if result is None else f"MOVED: {result}"
    ledger = "equal" if a.ledger == b.ledger else "DIFFERS"
    return str(case), ledger, str(spread(a.loss, b.loss)), str(spread(a.norm, b.norm)), verdict


@contextlib.contextmanager
def tree_of(commit: str | None) -> Iterator[Tree]:
    if commit is None:
        yield working_tree()
    else:
        with checkout(commit) as tree:
            yield tree


@contextlib.contextmanager
def workshop(tree: Tree, threads: int) -> Iterator[Workshop]:
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        shop = Workshop(tree, Path(folder), threads=threads)
        shop.prepare()
        yield shop


def count_steps(form: str, max_steps: int | None) -> int:
    return min(FORMS[form].steps, max_steps or FORMS[form].steps)


def train(
    shop: Workshop, steps: dict[Case, int], jobs: int
) -> Iterator[tuple[Case, Curve | GoldenError, float]]:
    """Train the cases, several at a time; yield each as it ends, with its seconds."""

    def timed(case: Case) -> tuple[Case, Curve | GoldenError, float]:
        began = time.monotonic()
        curve: Curve | GoldenError
        try:
            curve = shop.train(case, steps[case])
        except GoldenError as error:
            curve = error
        return case, curve, time.monotonic() - began

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(timed, case) for case in steps]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            for waiting_case in waiting:
                waiting_case.cancel()
            shop.stop()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def names(text: str) -> list[str]:
    return text.replace(",", " ").split()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, function in (("record", record), ("regress", regress)):
        command = commands.add_parser(name)
        command.set_defaults(function=function, form="short", a=None, b=None, rounding=False)
        command.add_argument("--models", type=names, default=[], help=", ".join(SHORT))
        command.add_argument("--layouts", type=names, default=[], help=", ".join(LAYOUTS))
        command.add_argument(
            "--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time"
        )
        command.add_argument("--steps", type=int, help="at most")
        command.add_argument("--threads", type=int, default=THREADS, help="of each rank")
        command.add_argument("--recordings", type=Path, default=FOLDER, help="their folder")
        command.add_argument("--a", metavar="COMMIT", help="train the tree of this commit")
        long = {"action": "store_const", "dest": "form"}
        command.add_argument("--long", **long, const="long", help="2,000 steps, not 200")
        if name == "record":
            command.add_argument(
                "--missing",
                action="store_true",
                help="only what is not recorded, or with fewer steps",
            )
        else:
            command.add_argument("--b", metavar="COMMIT", help="… beside this one's")
            command.add_argument("--quick", **long, const="quick", help="a few steps, some cases")
            command.add_argument(
                "--shortest", **long, const="shortest", help="those of `make test`"
            )
            command.add_argument("--rounding", action="store_true", help="compare within bounds")
    asked = parser.parse_args(words)
    try:
        return asked.function(asked)
    except GoldenError as error:
        say(f"error: {error}")
        return error.code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `train` ends the runs that it started
    sys.exit(main())
