"""Source trees, and training in them: the commands of a tree, run as subprocesses.

Nothing of headrace is imported here: a run is started by the console scripts that the tree's
pyproject.toml names, and read from the files of its folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import corpus
from .cases import THREADS, Case, GoldenError

ROOT = Path(__file__).parents[2]
STOPPED = 85
"""Exit code of a run that `--stop-after` has ended."""
LAST_LINES = 100
OWN_VARIABLES = ("OMP_", "MKL_", "KMP_", "ONEDNN_", "DNNL_", "GLOO_", "PYTHONPATH", "HEADRACE_")
"""Variables that would change a run. ATEN_CPU_CAPABILITY stays: it is recorded."""
GROUP_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True)
class Curve:
    """Ledger hash, loss and gradient norm of each step. None stands for a number that is not
    finite."""

    ledger: list[str]
    loss: list[float | None]
    norm: list[float | None]


@dataclass(frozen=True)
class Tree:
    root: Path
    commit: str
    """Hash of the commit; with `+` where files beside benchmarks/ have changed since."""


def working_tree(root: Path = ROOT) -> Tree:
    try:
        commit = git("rev-parse", "HEAD", root=root)
        changed = git("status", "--porcelain", "--", ".", ":!benchmarks", ":!docs", root=root)
    except GoldenError:
        return Tree(root, "unknown")  # an unpacked archive
    return Tree(root, commit + "+" * bool(changed))


@contextlib.contextmanager
def checkout(commit: str, root: Path = ROOT) -> Iterator[Tree]:
    """The tree of a commit, in a temporary folder."""
    full = full_hash(commit, root)
    with tempfile.TemporaryDirectory(prefix="golden-tree-") as folder:
        packed = Path(folder) / "tree.tar"
        git("archive", "--output", str(packed), full, root=root)
        tree = Path(folder) / "tree"
        tree.mkdir()
        subprocess.run(["tar", "-x", "-f", str(packed), "-C", str(tree)], check=True)
        yield Tree(tree, full)


def full_hash(commit: str, root: Path = ROOT) -> str:
    return git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}", root=root)


def git(*words: str, root: Path) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        raise GoldenError("git is not installed", "install git") from None
    if done.returncode:
        raise GoldenError(
            f"`git {' '.join(words)}` failed in {root} {done.stderr.strip()}".rstrip(),
            "name a commit, branch or tag that `git log` shows; a shallow clone may need "
            "`git fetch --unshallow`",
            code=2,
        )
    return done.stdout.strip()


class Workshop:
    """Temporary folder in which a tree builds the datasets and trains."""

    def __init__(self, tree: Tree, folder: Path, *, threads: int = THREADS) -> None:
        self.tree = tree
        self.folder = folder
        self.threads = threads
        self.scripts: dict[str, str] = {}
        self.running: set[subprocess.Popen[str]] = set()

    def prepare(self) -> None:
        """Check the tree, write the corpus and build its datasets."""
        try:
            project = tomllib.loads((self.tree.root / "pyproject.toml").read_text())
            self.scripts = project["project"]["scripts"]
        except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
            raise GoldenError(
                f"{self.tree.root} is no tree of headrace: {error}", "name another commit"
            ) from None
        where = self.run([sys.executable, "-c", "import headrace; print(headrace.__file__)"])
        if not Path(where.strip()).resolve().is_relative_to(self.tree.root.resolve()):
            raise GoldenError(
                f"`import headrace` gives {where.strip()}, not the tree {self.tree.root}",
                "the tree needs the link .root/headrace",
            )
        corpus.write_corpus(self.folder)
        for source, words in corpus.BUILDS.items():
            self.run([*self.command("tokenize"), "build", *words, "--out", f"data/{source}"])

    def train(self, case: Case, steps: int, extra: Sequence[str] = ()) -> Curve:
        """Train the first steps of a case; `extra` are more overrides."""
        name = f"{case.model}.{case.layout}"
        mixture = self.folder / f"{name}.yaml"
        mixture.write_text(corpus.mixture(case.length))
        out = self.folder / "runs" / name
        shutil.rmtree(out, ignore_errors=True)  # of an earlier run, which this one would resume
        whole = steps >= corpus.TOTAL_STEPS
        stop = [] if whole else ["--stop-after", str(steps)]
        words = ["run", "--mixture", str(mixture), "--out", str(out), *stop, *case.words()]
        words += [f"threads={self.threads}", *extra]
        self.run([*self.command("trainer"), *words], code=0 if whole else STOPPED)
        curve = read_run(out)
        if len(curve.loss) != steps:
            raise GoldenError(
                f"{case}: the run stopped after {len(curve.loss)} steps, not {steps}",
                "it was interrupted: start the command again",
            )
        return curve

    def digest(self, case: Case) -> str:
        return corpus.digest(self.folder, case.length)

    def command(self, name: str) -> list[str]:
        """A console script of the tree."""
        module, _, function = self.scripts[name].partition(":")
        start = f"import sys; from {module} import {function} as main; sys.argv[0] = {name!r}"
        return [sys.executable, "-c", f"{start}; sys.exit(main())"]

    def environment(self) -> dict[str, str]:
        """Variables of the commands."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(OWN_VARIABLES) and name not in GROUP_VARIABLES
        }
        return {**kept, "PYTHONPATH": str(self.tree.root / ".root"), "PYTHONHASHSEED": "0"}

    def run(self, words: Sequence[str], *, code: int = 0) -> str:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words, cwd=self.folder, env=self.environment(), stdout=pipe, stderr=pipe, text=True
        )
        self.running.add(process)
        try:
            output, errors = process.communicate()
        finally:
            self.running.discard(process)
        if process.returncode != code:
            said = "\n".join(f"  | {line}" for line in errors.splitlines()[-LAST_LINES:])
            asked = " ".join(words[3:] if words[1] == "-c" else words)
            raise GoldenError(
                f"a command failed with exit code {process.returncode} in the tree of "
                f"{self.tree.commit[:12]}: {asked}\n{said}",
                "an older commit may lack a model or an option: choose cases with MODELS and "
                "LAYOUTS",
            )
        return output

    def stop(self) -> None:
        """End the commands that other threads run."""
        for process in list(self.running):
            process.terminate()


def read_run(folder: Path) -> Curve:
    """Read the curve from the files of a run's folder."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return Curve(
        ledger=[entry["hash"] for entry in ledger],
        loss=[entry["loss"] for entry in metrics],
        norm=[entry["grad_norm"] for entry in metrics],
    )
