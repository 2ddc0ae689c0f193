"""Read a comparison's results from its runs as they stand, and prove that their rows are equal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...console.errors import IntegrityError, RunError
from ...dataplane.runlog import ledger
from ...dataplane.runlog import writer as lines
from ...models.accounting.memory import generation_bytes
from ...trainer.folders import folder as files
from ...trainer.run.stored import read_run
from ..board.byte_sizes import bits_per_byte, bytes_per_token
from .folder import ComparedRun, ComparisonFolder
from .prepare import PreparedComparison

STATE_LENGTHS = (512, 2048, 8192, 32768, 131072)
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Result:
    """A run's or a peer's measurements, up to the comparison's step."""

    name: str
    model: str
    """Shipped name or file stem; a peer's own name."""
    seed: int | None
    """None: a peer."""
    root: Path
    ledger: str
    """Hash of all rows up to the comparison's step."""
    tokens: Sequence[int]
    bits: Sequence[float]
    """Held-out bits per byte after so many tokens, the mean over the sources."""
    by_source: Mapping[str, float]
    tokens_per_second: float
    """Median over the steps."""
    recall: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    step: int
    """Steps that every run has taken."""
    tokens: int
    plan: str
    ledger: str
    """The ledger's hash after `step` steps, equal in all runs and peers."""
    results: Sequence[Result]
    """The first seed of each model, further seeds of the first model, then peers."""
    parameters: Mapping[str, int]
    state_bytes: Mapping[str, Sequence[int]]
    """Bytes of a sequence in generation by model, after each of STATE_LENGTHS tokens."""

    @property
    def noise(self) -> float | None:
        """Return the standard deviation of the first model's bits among seeds, at the last
        evaluation; None with one seed."""
        seeds = [r.bits[-1] for r in self.seeds if r.bits]
        return statistics.stdev(seeds) if len(seeds) > 1 else None

    @property
    def models(self) -> list[str]:
        return [name for name in self.names if name in self.parameters]

    @property
    def peers(self) -> list[str]:
        return [name for name in self.names if name not in self.parameters]

    @property
    def names(self) -> list[str]:
        """Return the models' names, then the peers'."""
        return list(dict.fromkeys(result.model for result in self.results))

    def first(self, model: str) -> Result:
        """Return a model's run with its first seed."""
        return next(result for result in self.results if result.model == model)

    def mean_bits(self, model: str) -> float | None:
        """Return a model's last bits per byte, the mean over its seeds."""
        bits = [r.bits[-1] for r in self.results if r.model == model and r.bits]
        return statistics.mean(bits) if bits else None

    @property
    def seeds(self) -> Sequence[Result]:
        """Return the runs of the first model."""
        first = self.results[0].model
        return [r for r in self.results if r.model == first]


def read_comparison(
    folder: ComparisonFolder, prepared: PreparedComparison, entries: Sequence[ComparedRun]
) -> Comparison:
    """Read all runs that have begun, at the last step that all have taken."""
    begun = [entry for entry in entries if folder.run_folder(entry).ledger.exists()]
    if not begun:
        raise RunError(f"no run of {folder.root} has begun", hint="train them: --tokens 1M")
    roots: dict[str, tuple[ComparedRun | None, Path]] = {
        entry.name: (entry, folder.run_folder(entry).root) for entry in begun
    }
    roots |= {name: (None, path) for name, path in folder.peers().items()}
    step, digest = check_equal_rows({name: root for name, (_, root) in roots.items()})
    sizes = bytes_per_token({source.name: source.url for source in prepared.held_out.sources})
    results = [
        _read_result(name, entry, root, step, digest, sizes)
        for name, (entry, root) in roots.items()
    ]
    precision = read_run(folder.run_folder(begun[0])).precision
    return Comparison(
        step=step,
        tokens=prepared.plan.step(step - 1).end_token,
        plan=prepared.plan.hash,
        ledger=digest,
        results=results,
        parameters=prepared.parameters,
        state_bytes={
            name: [generation_bytes(model, n, precision=precision) for n in STATE_LENGTHS]
            for name, model in prepared.models.items()
        },
    )


def check_equal_rows(roots: Mapping[str, Path]) -> tuple[int, str]:
    """Return the number of steps that all ledgers have, and their hash there; raise if the hashes
    differ.

    A hash covers the plan and the tokens of all rows so far, in their order.
    """
    ends = {name: ledger.read_last(root / ledger.NAME) for name, root in roots.items()}
    if empty := [name for name, end in ends.items() if end is None]:
        raise RunError(f"the ledger of {', '.join(empty)} is empty", hint="train it: --tokens 1M")
    last = min(end.step for end in ends.values() if end is not None)
    hashes = {name: _hash_at(root, last) for name, root in roots.items()}
    if len(set(hashes.values())) == 1:
        return last + 1, next(iter(hashes.values()))
    (first, root), *later_roots = roots.items()
    differing = [(name, path) for name, path in later_roots if hashes[name] != hashes[first]]
    where = "\n".join(
        f"    {name}: from step {_first_difference(root, path, last):,}" for name, path in differing
    )
    raise IntegrityError(
        f"the runs have not read the rows of {first}",
        where=f"\n{where}",
        hint="their curves cannot be compared: train them again from the comparison's mixture",
    )


def _hash_at(root: Path, step: int) -> str:
    entry = ledger.find_entries(root / ledger.NAME, step)[1]
    if entry is None:
        raise IntegrityError(
            f"{root / ledger.NAME} has no step {step}", hint="restore it from a copy"
        )
    return entry.hash


def _first_difference(first: Path, second: Path, last: int) -> int:
    """Return the first step at which two ledgers differ; both differ at `last`, and each hash
    contains the one before."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if _hash_at(first, middle) == _hash_at(second, middle):
            low = middle + 1
        else:
            high = middle
    return low


def _read_result(
    name: str,
    entry: ComparedRun | None,
    root: Path,
    step: int,
    digest: str,
    sizes: Mapping[str, float],
) -> Result:
    evaluations = [
        (
            line["tokens"],
            {s: bits_per_byte(line["sources"][s]["loss"], size) for s, size in sizes.items()},
        )
        for line in _lines(root / files.EVALUATIONS)
        if line["step"] < step
    ]
    speeds = [line["tokens_per_second"] for line in _lines(root / METRICS) if line["step"] < step]
    recall = [line for line in _lines(root / files.RECALL) if line["step"] == step]
    return Result(
        name=name,
        model=entry.model if entry else name,
        seed=entry.seed if entry else None,
        root=root,
        ledger=digest,
        tokens=[tokens for tokens, _ in evaluations],
        bits=[statistics.mean(by_source.values()) for _, by_source in evaluations],
        by_source=evaluations[-1][1] if evaluations else {},
        tokens_per_second=statistics.median(speeds),
        recall=recall[-1]["tasks"] if recall else {},
    )


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    return iter(lines.read(file)) if file.exists() else iter(())


def results_json(comparison: Comparison, folder: ComparisonFolder) -> dict[str, Any]:
    """Return the results as results.json and `--json` have them."""
    return {
        "folder": str(folder.root),
        "page": str(folder.page),
        "unit": "bits per byte",
        "step": comparison.step,
        "tokens": comparison.tokens,
        "plan": comparison.plan,
        "ledger": comparison.ledger,
        "noise": comparison.noise,
        "runs": [
            {
                "name": result.name,
                "model": result.model,
                "seed": result.seed,
                "parameters": comparison.parameters.get(result.model),
                "ledger": result.ledger,
                "tokens": list(result.tokens),
                "bits": list(result.bits),
                "by_source": dict(result.by_source),
                "tokens_per_second": result.tokens_per_second,
                "recall": {task: list(scores) for task, scores in result.recall.items()},
            }
            for result in comparison.results
        ],
        "state": {
            "lengths": list(STATE_LENGTHS),
            "bytes": {name: list(counts) for name, counts in comparison.state_bytes.items()},
        },
    }
