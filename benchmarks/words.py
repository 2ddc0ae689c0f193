"""Words of the product's docstrings and bound names, by room, beside those of its peers.

    python -m benchmarks.words                  a line for each room
    python -m benchmarks.words planner/prices   and for each module of a room, with its names

`of`, `that`, `it` and `each` count words of four groups in 1,000 words of docstrings; `long` is the
share of words with more than six letters. `empty` is the share of bound names that say nothing
of what they hold: a variable called `found` or `each`; `name` and `text` are two of them, but often
the right word, so `empty*` leaves them out. `preposition` counts public functions that begin or end
in a preposition, `twice` class names that the product binds more than once. A reader judges; the
figures tell where to look.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *("configs", "console", "dataplane", "mixtures", "models"),
    *("planner", "reports", "tokenize", "trainer"),
)
EMPTY = frozenset(
    re.findall(
        r"\w+",
        "found each one own given made wanted beside left other others whole part parts most least "
        "name text rest which what there here",
    )
)
OFTEN_RIGHT = frozenset({"name", "text"})
GROUPS = {
    "of": frozenset({"of"}),
    "that": frozenset({"that", "which"}),
    "it": frozenset(["it", "its", "they", "them", "their"]),
    "each": frozenset(["each", "one", "other", "others", "own"]),
}
PREPOSITIONS = frozenset(("of", "in", "on", "at", "by", "to", "from", "with", "for", "as", "into"))
PEERS = {
    "torchtitan": (49.1, 0.26, 8, 6, 8, 8, 8.9, 0.006),
    "OLMo-core": (40.5, 0.25, 23, 8, 4, 7, 8.5, 0.008),
    "grain": (18.6, 0.30, 23, 11, 8, 6, 8.0, 0.007),
    "httpx": (5.2, 0.28, 13, 12, 4, 2, 6.8, 0.023),
    "nanochat": (6.1, 0.25, 16, 9, 7, 8, 7.8, 0.008),
    "nanotron": (12.3, 0.25, 24, 8, 5, 6, 9.1, 0.013),
}
"""Figures of other repositories (August 2026), by the same rules: thousands of words, share of long
words, the four groups in 1,000 words, mean length of a bound name, share of empty names."""


@dataclass
class Words:
    """Docstring words and bound names of some modules."""

    docstrings: list[str] = field(default_factory=list)
    names: Counter[str] = field(default_factory=Counter)
    functions: list[str] = field(default_factory=list)
    """Public functions and methods."""
    classes: Counter[str] = field(default_factory=Counter)

    def add(self, file: Path) -> None:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                # Docstrings, and the strings below fields and constants.
                case ast.Expr(value=ast.Constant(value=str(text))):
                    self.docstrings.append(text)
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    self.names[name] += 1
                case ast.FunctionDef(name=name) if not name.startswith("_"):
                    self.functions.append(name)
                case ast.ClassDef(name=name):
                    self.classes[name] += 1

    def figures(self) -> tuple[float, ...]:
        """Return the figures of a line, as `PEERS` has them, then `empty*` and `preposition`."""
        text = re.sub(r"`[^`]*`", " ", "\n".join(self.docstrings))
        words = [word.lower() for word in re.findall(r"[A-Za-z']+", text)]
        counts = Counter(words)
        num_words, num_names = max(1, len(words)), max(1, self.names.total())
        return (
            len(words) / 1000,
            sum(len(word) > 6 for word in words) / num_words,
            *(1000 * sum(counts[word] for word in group) / num_words for group in GROUPS.values()),
            sum(len(name) * count for name, count in self.names.items()) / num_names,
            sum(self.names[name] for name in EMPTY) / num_names,
            sum(self.names[name] for name in EMPTY - OFTEN_RIGHT) / num_names,
            len([name for name in self.functions if is_preposition_at_an_end(name)]),
        )


def is_preposition_at_an_end(function: str) -> bool:
    first, *_, last = (*function.split("_"), function.split("_")[-1])
    return not PREPOSITIONS.isdisjoint({first, last})


def words_of(files: Iterable[Path]) -> Words:
    words = Words()
    for file in files:
        words.add(file)
    return words


def line(label: str, figures: Sequence[float]) -> str:
    thousands, long, of, that, it, every, length, empty, *more = figures
    last = f" {more[0]:7.1%} {more[1]:5.0f}" if more else ""
    return (
        f"{label:30} {thousands:6.1f}k {long:5.0%} {of:5.0f} {that:5.0f} {it:4.0f} {every:5.0f} "
        f"{length:5.1f} {empty:6.1%}{last}"
    )


def rooms() -> dict[str, list[Path]]:
    """Return the modules of each room: a folder of a folder; its other modules are one room."""
    result: dict[str, list[Path]] = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            room = "/".join(file.relative_to(ROOT).parts[:-1][:2])
            result.setdefault(room, []).append(file)
    return result


def main(arguments: Sequence[str]) -> None:
    print(
        f"{'':30} {'words':>7} {'long':>5} {'of':>5} {'that':>5} {'it':>4} {'each':>5} {'mean':>5} "
        f"{'empty':>6} {'empty*':>7} {'prep.':>5}"
    )
    modules = rooms()
    if unknown := [room for room in arguments if room.rstrip("/") not in modules]:
        sys.exit(f"no room {', '.join(unknown)}; rooms are {', '.join(modules)}")
    for peer, figures in PEERS.items():
        print(line(peer, figures))
    product = words_of(file for files in modules.values() for file in files)
    print(line("headrace", product.figures()))
    for room in sorted(modules, key=lambda room: -words_of(modules[room]).figures()[7]):
        print(line(room, words_of(modules[room]).figures()))
    for room in arguments:
        print(f"\n{room}")
        for file in modules[room.rstrip("/")]:
            words = words_of([file])
            empty = {name: words.names[name] for name in sorted(EMPTY) if words.names[name]}
            print(line(file.name, words.figures()), " ".join(f"{n}×{c}" for n, c in empty.items()))
    twice = sorted(name for name, count in product.classes.items() if count > 1)
    print(f"\nclass names bound more than once, {len(twice)}: {' '.join(twice)}")


if __name__ == "__main__":
    main(sys.argv[1:])
