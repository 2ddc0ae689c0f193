"""The figures of docs/explanations/, computed by the code that they explain: `make pictures`.

    python -m docs.generate.explanations

A test draws them again and compares them with the files (tests/test_docs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np

from headrace.dataplane.order.apportionment import Assignment
from headrace.dataplane.order.simulation import Segment
from headrace.dataplane.order.source_order import Draws, Position, SourceOrder
from headrace.dataplane.runlog.ledger import roll
from headrace.trainer.checkpoints.fragments import cover

from .figure import COLOURS, Figure

OUT = Path(__file__).parents[1] / "pictures"


def main() -> None:
    for name, draw in FIGURES.items():
        (OUT / f"{name}.svg").write_text(draw())
        print(OUT / f"{name}.svg")


def order() -> str:
    """Return the way from a dataset to the rows of a source: chunks, windows, rows."""
    chunk, window, length = 16, 4, 4
    source = SourceOrder(seed=7, name="web", tokens=256, chunk=chunk, window=window)
    rows = np.arange(source.end_row(0, length))
    starts = Draws([source], [Position()], length).locate(np.zeros_like(rows), rows)[1]
    chunks = list(dict.fromkeys((starts // chunk).tolist()))  # in the order of their first rows
    width = 27.5

    def colour(number: int) -> str:
        return COLOURS[chunks.index(number) // window]

    figure = Figure(
        "A dataset is cut into chunks, which are permuted; rows are permuted in a window", 268
    )
    figure.text(20, 24, "The dataset: one sequence of tokens, cut into chunks", "strong")
    for number in range(len(chunks)):
        figure.box((20 + number * width, 34), (width - 2, 24), colour(number), str(number))
    figure.arrow(240, 62)
    figure.text(20, 92, "Chunks in a permuted order, in windows of four", "strong")
    for place, number in enumerate(chunks):
        gap = 6 * (place // window) - 9
        figure.box((20 + place * width + gap, 102), (width - 2, 24), colour(number), str(number))
    figure.path("M11 130V138M119 130V138M11 138H119")
    figure.text(20, 158, "The first window: its rows in a permuted order", "strong")
    for place, start in enumerate(starts[: window * chunk // length].tolist()):
        figure.box(
            (20 + place * width, 166), (width - 2, 24), colour(start // chunk), str(start // chunk)
        )
        figure.text(20 + place * width + 13, 206, str(place), "small quiet", "middle")
    figure.text(20, 226, "row of the source, counted from 0", "small quiet")
    first = int(starts[5])
    figure.text(
        20, 250, f"row 5 reads tokens {first} to {first + length}, and one more as the last target"
    )
    return figure.svg()


def mixing() -> str:
    """Return the sources of the first rows, and how far each is from its share."""
    weights, names, count = (5, 3, 2), ("web 50%", "code 30%", "math 20%"), 28
    assignment = Assignment([Segment(count, weights, 1)])
    sources = assignment.locate(np.arange(count))[0]
    width = 440 / count
    figure = Figure("The source of each row, and how far each source is from its share", 230)
    figure.text(20, 24, "The source of each row", "strong")
    for row, source in enumerate(sources.tolist()):
        figure.box((20 + row * width, 34), (width - 1.5, 24), COLOURS[source])
    figure.text(20, 92, "Rows given, less the share of all rows so far", "strong")
    for height, label in ((110, "+1"), (150, "0"), (190, "−1")):
        figure.path(f"M40 {height}H460", 'stroke-dasharray="3 3"' if label != "0" else "")
        figure.text(34, height + 4, label, "small quiet", "end")
    for source, weight in enumerate(weights):
        drawn = np.concatenate([[0], np.cumsum(sources == source)])
        ahead = drawn - np.arange(count + 1) * weight / sum(weights)
        assert (abs(ahead) < 1).all()
        points = [
            (40 + row * 420 / count, 150 - 40 * value) for row, value in enumerate(ahead.tolist())
        ]
        figure.line(points, COLOURS[source])
        figure.box((20 + 110 * source, 208), (11, 11), COLOURS[source])
        figure.text(37 + 110 * source, 218, names[source], "small")
    return figure.svg()


def ranks() -> str:
    """Return the rows of a step on one, two and four ranks."""
    rows, width = 8, 48
    figure = Figure("The eight rows of a step on one, two and four ranks", 190)
    figure.text(20, 24, "Step 20: the rows 160 to 167, whoever takes them", "strong")
    for number, world in enumerate((1, 2, 4)):
        y = 44 + 46 * number
        figure.text(20, y + 19, f"{world} rank{'s' * (world > 1)}", "small")
        for row in range(rows):
            rank = row * world // rows
            figure.box((76 + row * width, y), (width - 2, 28), COLOURS[rank], str(160 + row))
        for rank in range(1, world):
            figure.path(f"M{75 + rank * rows // world * width} {y - 4}v36")
    return figure.svg()


def ledger() -> str:
    """Return the ledger of a run that was killed and resumed, beside that of one that was not."""
    digests = [blake2b(b"step %d" % step, digest_size=16).digest() for step in range(6)]
    hashes = [blake2b(b"plan", digest_size=16).hexdigest()]
    for digest in digests:
        hashes.append(roll(hashes[-1], digest))
    figure = Figure("The ledger of a run that was killed is cut back and continued", 288)
    width = 72
    for y, title in (
        (24, "A run on one rank, never interrupted"),
        (124, "The same run: killed in step 5, resumed on four ranks"),
    ):
        figure.text(20, y, title, "strong")
    for y, steps in ((34, range(6)), (134, range(5))):
        for step in steps:
            colour = COLOURS[4] if y == 134 and step >= 3 else COLOURS[0]
            figure.box((20 + step * width, y), (width - 6, 40), colour, f"step {step}")
            figure.text(53 + step * width, y + 54, hashes[step + 1][:6], "small mono", "middle")
    figure.path("M233 130v64", 'stroke-dasharray="3 3"')
    figure.text(
        226, 208, "newest checkpoint: the rest is cut off and kept", "small quiet", "middle"
    )
    for step in range(3, 6):
        figure.box((20 + step * width, 222), (width - 6, 40), COLOURS[2], f"step {step}")
        figure.text(53 + step * width, 276, hashes[step + 1][:6], "small mono", "middle")
    figure.text(20, 240, "four ranks take the", "small")
    figure.text(20, 254, "same rows again:", "small")
    figure.text(20, 268, "the same hashes", "small")
    return figure.svg()


def fragments() -> str:
    """Return one matrix as three engines cut it, with the boxes that a checkpoint stores."""
    shape, cell = (8, 6), 20
    figure = Figure("One matrix of 8 rows and 6 columns, cut by three layouts", 262)
    edges = (0, 18, 34, 48)
    cuts = (
        ("ZeRO, 3 ranks", [flat(*edges[rank : rank + 2], shape) for rank in range(3)]),
        ("FSDP2, 4 ranks", [flat(12 * rank, 12 * rank + 12, shape) for rank in range(4)]),
        (
            "TP, 2 ranks",
            [
                [(row, 3 * rank + column) for row in range(8) for column in range(3)]
                for rank in (0, 1)
            ],
        ),
    )
    figure.text(20, 24, "The same weight in three layouts; a colour for each rank", "strong")
    for number, (title, parts) in enumerate(cuts):
        left_x = 20 + 154 * number
        figure.text(left_x, 48, title, "small")
        for rank, cells in enumerate(parts):
            for row, column in cells:
                figure.box(
                    (left_x + column * cell, 56 + row * cell), (cell - 1, cell - 1), COLOURS[rank]
                )
    boxes = list(cover(shape, *edges[1:3], 48))
    for box in boxes:
        (top, first), (high, wide) = box.offsets, box.sizes
        x, y = 20 + first * cell - 0.5, 56 + top * cell - 0.5
        figure.path(
            f"M{x:g} {y:g}h{wide * cell:g}v{high * cell:g}h{-wide * cell:g}z", 'stroke-width="2"'
        )
    figure.text(20, 238, f"ZeRO's middle rank stores {len(boxes)} boxes (outlined).")
    figure.text(20, 254, "A reader with any other cut reads the parts of boxes that it needs.")
    return figure.svg()


def flat(start: int, end: int, shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the elements of a row-major range of a matrix."""
    return [divmod(index, shape[1]) for index in range(start, end)]


def saving() -> str:
    """Return the parts of a save, in their order."""
    figure = Figure("The parts of a save", 236)
    lanes = (
        ("training", [(0, 5, 4, "steps"), (5, 1.6, 1, "copy"), (6.6, 9.4, 4, "steps go on")]),
        (
            "thread",
            [(6.6, 4.2, 0, "write and hash"), (10.8, 2.7, 2, "manifest"), (13.5, 2.5, 3, "rename")],
        ),
    )
    figure.text(20, 24, "The step waits for a copy alone", "strong")
    for number, (name, parts) in enumerate(lanes):
        y = 40 + 44 * number
        figure.text(20, y + 20, name, "small")
        for begin, length, colour, words in parts:
            figure.box((84 + begin * 23.5, y), (length * 23.5 - 2, 30), COLOURS[colour], words)
    figure.text(20, 152, "What a kill leaves behind", "strong")
    for y, when, effect in (
        (174, "before the rename", "a .tmp folder, which the next start deletes;"),
        (192, "", "the checkpoint before it is untouched"),
        (214, "after the rename", "a whole checkpoint: every file has its hash in the manifest"),
    ):
        figure.text(20, y, when, "small")
        figure.text(130, y, effect, "small")
    return figure.svg()


FIGURES: dict[str, Callable[[], str]] = {
    "order": order,
    "mixing": mixing,
    "ranks": ranks,
    "ledger": ledger,
    "fragments": fragments,
    "saving": saving,
}

if __name__ == "__main__":
    main()
