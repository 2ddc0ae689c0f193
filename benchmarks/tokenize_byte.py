"""Byte-level tokenizing, compared with a limit: the least that numpy must do.

    python -m benchmarks.tokenize_byte          prints one line

The limit reads the whole file, converts bytes to uint16, replaces line ends by the end of document,
hashes and writes. headrace also finds documents, checks UTF-8, stores origins, cuts shards and
commits a dataset. The figures compare CPU seconds on one core; the two alternate.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.sources.format import SourceConfig

MEGABYTES, ROUNDS = 200, 5


def write_corpus(path: Path) -> None:
    """Write lines of about 2,000 bytes, with words from Python's standard library."""
    words = Path(os.__file__).read_text().split()
    rng = random.Random(0)
    block = "".join(
        " ".join(rng.choices(words, k=rng.randint(100, 500))) + "\n" for _ in range(2000)
    ).encode()
    path.write_bytes(block * (MEGABYTES * 1_000_000 // len(block)))


def limit(corpus: Path, out: Path) -> None:
    octets = np.frombuffer(corpus.read_bytes(), np.uint8)
    tokens = octets.astype(np.uint16)
    tokens[octets == ord("\n")] = 256
    digest = hashlib.sha256(tokens.data).hexdigest()
    with (out / f"{digest}.bin").open("wb") as file:
        file.write(tokens.data)
        file.flush()
        os.fsync(file.fileno())


def ours(corpus: Path, out: Path) -> None:
    config = BuildConfig(
        inputs=(str(corpus),),
        out=str(out),
        tokenizer="byte",
        source=SourceConfig(text_documents="line"),
        engine=ExecutorConfig(workers=1),
    )
    build(config)


def seconds(run: Callable[[Path, Path], None], corpus: Path, folder: Path) -> float:
    out = folder / "out"
    out.mkdir()
    began = time.process_time()
    run(corpus, out)
    took = time.process_time() - began
    shutil.rmtree(out)
    return took


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.txt"
        write_corpus(corpus)
        taken: dict[str, list[float]] = {"limit": [], "ours": []}
        for number in range(ROUNDS + 1):
            for label, run in (("limit", limit), ("ours", ours)):
                took = seconds(run, corpus, folder)
                if number:  # the first round warms up
                    taken[label].append(took)
        size = corpus.stat().st_size / 1e6
        speed = {label: size / statistics.median(times) for label, times in taken.items()}
        print(
            f"byte-level, lines: {speed['ours']:.0f} MB per CPU second, "
            f"{speed['ours'] / speed['limit']:.2f}× of numpy's limit ({speed['limit']:.0f})"
        )


if __name__ == "__main__":
    main()
