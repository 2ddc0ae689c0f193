"""`headrace demo`: from text to a trained model at small size, with the ordinary commands.

    text ─ tokenize ─► datasets ─ mixtures ─► plan ─ trainer ─► model and report

Three corpora are collected on this machine: the standard library's source, descriptions of
installed packages, and synthetic DNA with repeats in lower case. A second demo reuses the first
demo's files.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import sysconfig
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...console import command
from ...console.errors import StorageError
from ...console.progress import format_duration
from ..cluster.ranks import INTERRUPTED
from ..folders.folder import RunFolder
from .shell import Shell, has_finished, note

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CODE_BYTES = 4_000_000
RECORDS, BASES = 12, 60_000
REPEAT_FAMILIES, REPEAT_BASES, REPEAT_COPIES = 4, 300, 60


@click.command()
@click.option(
    "--out", default="runs/demo", show_default=True, metavar="FOLDER", callback=command.local_path
)
@click.pass_context
def main(ctx: click.Context, out: str) -> None:
    """Tokenize, plan, train, interrupt and resume at small size, on two CPU ranks.

    It takes minutes, and shows each command before it runs.

    \b
    Example:
      headrace demo --out runs/demo

    More: README.md
    """
    began = time.monotonic()
    demo = Demo(Path(out))
    demo.run()
    command.say(
        f"\ndone in {format_duration(time.monotonic() - began)}"
        f"\n  run:    {demo.folder / 'run'}"
        f"\n  report: {RunFolder(demo.folder / 'run').report}"
    )


@dataclass
class Demo:
    """The demo's steps, which skip what an earlier demo has finished."""

    folder: Path

    @property
    def shell(self) -> Shell:
        return Shell(self.folder, "headrace demo")

    def run(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make {self.folder}: {error.strerror}", hint="choose another --out"
            ) from None
        command.say(f"in {self.folder}, with the commands of {Path(sys.executable).parent}")
        self.collect()
        self.build()
        self.train()

    def collect(self) -> None:
        corpora = self.folder / "corpora"
        if corpora.exists():
            note(f"the corpora exist already: {corpora}")
            return
        note("collect three corpora on this machine")
        unfinished = self.folder / "corpora.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        write_code(unfinished / "code")
        write_prose(unfinished / "prose")
        write_dna(unfinished / "dna.fa")
        unfinished.rename(corpora)

    def build(self) -> None:
        """Tokenize the text as bytes and as BPE, and DNA as bytes with less weight on repeats."""
        note("train a tokenizer; tokenize the text as bytes and as BPE")
        plain = ("--input-format", "text")
        code, prose = "corpora/code/*.py", "corpora/prose/*.txt"
        if not (self.folder / "bpe.json").exists():
            words = ("--vocab-size", "4096", "--out", "bpe.json", *plain)
            self.shell.run("tokenize", "train", code, prose, *words)
        for name, corpus in (("code", code), ("prose", prose)):
            for tokenizer in ("byte", "bpe.json"):
                out = f"data/{name}-{Path(tokenizer).stem}"
                words = ("--tokenizer", tokenizer, "--out", out, *plain)
                self.shell.run("tokenize", "build", corpus, *words)
        note("tokenize DNA as bytes; lower-case repeats weigh a tenth in the loss")
        dna = ("corpora/dna.fa", "--tokenizer", "byte", "--dna", "--out", "data/dna-byte")
        self.shell.run("tokenize", "build", *dna)

    def train(self) -> None:
        """Plan, train, interrupt, resume and audit a run on bytes; train a short run on BPE."""
        note("plan a mixture of two phases; the second replays the first")
        self.shell.run("mixtures", "plan", self.shipped("mixtures/demo.yaml"))
        if not has_finished(RunFolder(self.folder / "run")):
            if not RunFolder(self.folder / "run").begun:
                note("train on two ranks, and interrupt the run as a scheduler would")
                words = self.start("demo", "run")
                self.shell.run(*words, "--stop-after", "24", expected=(INTERRUPTED,))
            note("resume it")
            self.shell.run("trainer", "resume", "run")
            note("show the rows of its next step, checked against the run's ledger")
            self.shell.run("mixtures", "audit", "run", "--step", "24")
        if not has_finished(RunFolder(self.folder / "run-bpe")):
            note("train a shorter run on the BPE tokens of the same text")
            self.shell.run(*self.start("demo-bpe", "run-bpe"), "model.vocab_size=4096")

    def start(self, mixture: str, out: str) -> list[str]:
        """Return the command line that starts a run."""
        run, plan = self.shipped("runs/demo.yaml"), self.shipped(f"mixtures/{mixture}.yaml")
        return ["trainer", "run", run, "--mixture", plan, "--model", "tiny-hybrid", "--out", out]

    def shipped(self, name: str) -> str:
        """Return a shipped file's path, relative to the demo's folder if that is shorter."""
        file = Path(str(resources.files("headrace.configs"))) / name
        return min(os.path.relpath(file, self.folder), str(file), key=len)


def write_code(folder: Path) -> None:
    """Copy modules from the standard library."""
    folder.mkdir(parents=True)
    size = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        size += file.stat().st_size
        if size > CODE_BYTES:
            return
        shutil.copyfile(file, folder / file.name)


def write_prose(folder: Path) -> None:
    """Write the installed packages' descriptions."""
    folder.mkdir()
    for package in importlib.metadata.distributions():
        text = package.read_text("METADATA") or ""
        _, _, body = text.partition("\n\n")
        if len(body) > 500:
            (folder / f"{package.name.lower()}.txt").write_text(body, encoding="utf-8")


def write_dna(file: Path) -> None:
    """Write records with biased bases, and mutated repeats in lower case."""
    import numpy as np

    random = np.random.default_rng(7)
    families = [random.integers(0, 4, REPEAT_BASES) for _ in range(REPEAT_FAMILIES)]
    transitions = np.cumsum(random.dirichlet([2] * 4, size=(4, 4)), axis=-1)
    with file.open("w") as out:
        for number in range(RECORDS):
            letters = np.frombuffer(b"ACGT", np.uint8)[_walk(random, transitions)]
            for start in random.integers(0, BASES - REPEAT_BASES, REPEAT_COPIES):
                copy = families[random.integers(REPEAT_FAMILIES)].copy()
                changed = random.random(REPEAT_BASES) < 0.1
                copy[changed] = random.integers(0, 4, int(changed.sum()))
                letters[start : start + REPEAT_BASES] = np.frombuffer(b"acgt", np.uint8)[copy]
            out.write(f">record-{number} made up by headrace demo\n")
            text = letters.tobytes().decode()
            out.writelines(f"{text[at : at + 60]}\n" for at in range(0, BASES, 60))


def _walk(random: np.random.Generator, transitions: npt.NDArray[np.float64]) -> Sequence[int]:
    """Return bases; a base depends on the two before it.

    `transitions[a, b]` are cumulative probabilities of the base after a and b.
    """
    bases = [0, 0]
    limits = transitions.tolist()
    for draw in random.random(BASES - 2):
        bases.append(bisect(limits[bases[-2]][bases[-1]], draw, hi=3))
    return bases
