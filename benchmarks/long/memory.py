"""Memory of a training step: counted by the accounting, and measured by the CPU's allocator.

    python -m benchmarks.long.memory [--known] [FOLDER [WORD ...]]

Each tiny model trains under each engine, layout and recompute choice: on 1 rank, on 2 ranks of dp,
tp and cp, on 2 stages, with experts split over 2 ranks, and with two copies of FSDP2's state
(hsdp). Engines and layouts that do not fit together are left out. The words choose cells: those
whose name has one word of each list, as in `zero1,zero2 dp2 none,block`. A process measures many
cells. FOLDER/measured.jsonl has a line for each measured cell, and a cell that it has is not
measured again, so a changed accounting is compared without new runs. `--known` measures nothing and
compares the cells that the folder has.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

from headrace.console.errors import UserError

from .. import _memory, _ranks

LOW, HIGH = 0.99, 1.03
"""Bounds of counted by measured bytes."""
WORST = 12
MODELS = ("tiny-hybrid", "tiny-mamba", "tiny-moe", "tiny-transformer", "tiny-zamba")
ENGINES = {
    "fsdp2": ("engine.kind=fsdp2",),
    **{f"zero{stage}": ("engine.kind=deepspeed", f"engine.zero={stage}") for stage in range(4)},
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": ("processes=1",),
    "dp2": ("processes=2",),
    "tp2": ("processes=2", "layout.tp=2"),
    "cp2": ("processes=2", "layout.cp=2"),
    "ring": ("processes=2", "layout.cp=2", "layout.attention=ring"),
    "hsdp": ("processes=2", "engine.shard=1", "engine.gather=block"),
    "pp2": ("processes=2", "layout.pp=2"),
    "gpipe": ("processes=2", "layout.pp=2", "layout.schedule=gpipe"),
    "chunks": ("processes=2", "layout.pp=2", "layout.schedule=interleaved", "layout.chunks=2"),
    "ep2": ("processes=2", "layout.ep=2"),
}
STAGED = ("pp2", "gpipe", "chunks")
ENGINES_OF: dict[str, tuple[str, ...]] = {
    "hsdp": ("fsdp2",),
    "pp2": ("fsdp2", "zero0", "zero1"),
    "gpipe": ("fsdp2",),
    "chunks": ("fsdp2",),
    "ep2": ("fsdp2", "zero1", "zero2"),
}
"""Engines of a layout; the others have all."""
MODELS_OF: dict[str, tuple[str, ...]] = {
    "ring": ("tiny-hybrid", "tiny-transformer", "tiny-zamba"),
    "ep2": ("tiny-moe",),
}
"""Models of a layout: with attention, with experts; the others have all."""
RECOMPUTE = {
    "none": "none",
    "operator": "operator",
    "block": "block",
    "half": "0.5",
    "matmul": "{save: [matmul]}",
    "results": "{save: [attention, scan, convolution]}",
    "second": "{every: 2, save: [matmul, attention]}",
}
"""Choices of recompute, by their names in a cell."""
FEWER = ("none", "block", "operator", "matmul", "second")
LENGTH, ROWS = 256, 2
"""Tokens of a row, and rows of a micro-batch. A step has two micro-batches of each rank, and four
of each stage."""
LONG = 1024
"""Tokens of the long rows of some layouts, of which a micro-batch has one."""


@dataclass(frozen=True)
class Cell:
    """A run whose memory is counted and measured."""

    model: str
    engine: str
    layout: str
    recompute: str
    precision: str
    length: int = LENGTH

    @property
    def name(self) -> str:
        words = (self.model, self.engine, self.layout, self.recompute, self.precision)
        return " ".join((*words, *([str(self.length)] if self.length != LENGTH else [])))

    @property
    def ranks(self) -> int:
        return 1 if self.layout == "one" else 2

    @property
    def words(self) -> list[str]:
        """Return the words of the run's configuration, all but its recompute choice."""
        data = 2 if self.layout in ("dp2", "hsdp", "ep2", *STAGED) else 1
        parts = 2 if self.layout in ("cp2", "ring") else 1
        rows = ROWS if self.length == LENGTH else 1
        return [
            *ENGINES[self.engine],
            *LAYOUTS[self.layout],
            f"precision={self.precision}",
            f"synthetic.seq_len={self.length}",
            f"synthetic.batch_rows={2 * rows * data}",
            f"micro_batch_tokens={rows * self.length // parts}",
            "threads=1",
        ]


def cells() -> Iterator[Cell]:
    """Yield the cells of the matrix: fewer choices of recompute on two ranks, in bf16, and with
    long rows."""
    for engine, model, layout in product(ENGINES, MODELS, LAYOUTS):
        if engine not in ENGINES_OF.get(layout, ENGINES) or model not in MODELS_OF.get(
            layout, MODELS
        ):
            continue
        choices = list(RECOMPUTE) if layout == "one" else FEWER
        yield from (Cell(model, engine, layout, choice, "fp32") for choice in choices)
        if engine != "zero0" and layout not in (
            "ring",
            "gpipe",
            "chunks",
        ):  # ZeRO-0 sums bf16 gradients in bf16
            yield from (Cell(model, engine, layout, choice, "bf16") for choice in FEWER[:2])
        if engine in ("fsdp2", "zero2", "zero3") and layout in ("one", "dp2", "tp2", "cp2", "ring"):
            yield from (Cell(model, engine, layout, item, "fp32", LONG) for item in FEWER[:2])


def counted(cell: Cell) -> int | str:
    """Return the counted bytes of the fullest rank, or the reason why the run is refused."""
    try:
        words = [*cell.words, f"recompute={RECOMPUTE[cell.recompute]}"]
        return max(sum(parts.values()) for parts in _memory.counted(cell.model, words))
    except UserError as error:
        return str(error)


def measure(chosen: Sequence[Cell], file: Path) -> None:
    """Measure cells as one of the ranks. The first one writes."""
    import torch.distributed as dist

    runs: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for cell in chosen:
        runs[cell.model, *cell.words].append(cell)
    for (model, *words), alike in runs.items():
        choices = [RECOMPUTE[cell.recompute] for cell in alike]
        result = _memory.measured_rules(model, words, choices)
        if dist.get_rank() == 0:
            with file.open("a") as lines:
                for cell, peaks in zip(alike, result, strict=True):
                    lines.write(json.dumps({"cell": cell.name, "measured": max(peaks)}) + "\n")


def measured(file: Path) -> dict[str, int]:
    """Return the measured bytes by cell."""
    if not file.exists():
        return {}
    lines = (json.loads(line) for line in file.read_text().splitlines() if line.endswith("}"))
    return {line["cell"]: line["measured"] for line in lines}


def main(folder: Path, words: Sequence[str], *, known_only: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "measured.jsonl"
    expected = [set(word.split(",")) for word in words]
    chosen = [cell for cell in cells() if all(item & set(cell.name.split()) for item in expected)]
    number, known = len(chosen), measured(file)
    if known_only:
        chosen = [cell for cell in chosen if cell.name in known]
    answer: dict[Cell, int] = {}
    refused: Counter[str] = Counter()
    for cell in chosen:
        result = counted(cell)
        if isinstance(result, str):
            refused[f"{cell.model} {cell.engine} {cell.layout}: {result}"] += 1
        else:
            answer[cell] = result
    groups: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in answer:
        if cell.name not in known:
            groups[cell.engine, cell.ranks].append(cell)
    for (_, ranks), group in groups.items():
        _ranks.run(ranks, measure, group, file)
    known = measured(file)
    for line in report({cell: (size, known[cell.name]) for cell, size in answer.items()}, refused):
        print(line, flush=True)
    print(f"measured: {len(answer)} of {number} cells")


def report(bytes_by_cell: dict[Cell, tuple[int, int]], refused: Counter[str]) -> Iterator[str]:
    """Yield the lines: each cell, the shares by engine and layout, the worst, the orders."""
    ratios = {cell: counted / real for cell, (counted, real) in bytes_by_cell.items()}
    for cell, ratio in ratios.items():
        mark = "" if is_near(ratio) else "  outside"
        yield f"{cell.name:<52} {bytes_by_cell[cell][1] / 2**20:7.2f} MiB  {ratio:.3f}{mark}"
    yield ""
    for key in ("engine", "layout", "model", "recompute", "precision", "length"):
        by: dict[str, list[float]] = defaultdict(list)
        for cell, ratio in ratios.items():
            by[str(getattr(cell, key))].append(ratio)
        yield from (f"{name:<18} {share(ratios_of_name)}" for name, ratios_of_name in by.items())
    yield f"{'all':<18} {share(ratios.values())}"
    yield ""
    for cell in sorted(ratios, key=lambda cell: distance(ratios[cell]))[-WORST:]:
        yield f"worst: {cell.name:<52} {ratios[cell]:.3f}"
    yield ""
    yield from orders(bytes_by_cell)
    yield from (f"refused: {reason} ({count} cells)" for reason, count in refused.items())


def is_near(ratio: float) -> bool:
    return LOW <= ratio <= HIGH


def distance(ratio: float) -> float:
    """Return how far a ratio is from 1, in parts of the bound on its side."""
    return (ratio - 1) / (HIGH - 1) if ratio > 1 else (1 - ratio) / (1 - LOW)


def share(ratios: Iterable[float]) -> str:
    every = sorted(ratios)
    span = f"; {every[0]:.3f} to {every[-1]:.3f}" if every else ""
    return f"{sum(map(is_near, every)):>4} of {len(every):>4} cells within bounds{span}"


def orders(bytes_by_cell: dict[Cell, tuple[int, int]]) -> Iterator[str]:
    """Compare the order of the recompute choices by counted memory with that by measured memory."""
    alike: dict[Hashable, list[tuple[Cell, int, int]]] = defaultdict(list)
    for cell, (size, real) in bytes_by_cell.items():
        key = (cell.model, cell.engine, cell.layout, cell.precision, cell.length)
        alike[key].append((cell, size, real))
    wrong, pairs, true, several = [], 0, 0, 0
    for group in alike.values():
        several += len(group) > 1
        inverted = []
        for (first, first_size, first_real), (second, second_size, second_real) in combinations(
            group, 2
        ):
            pairs += 1
            if (first_size - second_size) * (first_real - second_real) < 0:
                gap = abs(first_real - second_real) / max(first_real, second_real)
                inverted.append((gap, f"{first.name} and {second.recompute}"))
        true += len(group) > 1 and not inverted
        wrong += inverted
    right = f"{true} of {several} runs; {pairs - len(wrong)} of {pairs} pairs"
    yield f"recompute choices in their true order: {right}"
    for gap, choices in sorted(wrong, reverse=True)[:WORST]:
        yield f"inverted: {choices}, {gap:.1%} apart"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        arguments = [word for word in sys.argv[1:] if word != "--known"]
        root = arguments[0] if arguments else place
        main(Path(root), arguments[1:], known_only="--known" in sys.argv)
