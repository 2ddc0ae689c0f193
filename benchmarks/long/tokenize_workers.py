"""Speed of two worker processes over one: BPE with a 32k vocabulary.

The corpus is one large file of JSON lines, cut into slices. The figures compare wall time with the
start of the workers, so the machine must be idle. The two alternate; the best time counts.

    python -m benchmarks.long.tokenize_workers
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.tokenize_bpe import TRAIN_ON, write_corpus
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.train import TrainConfig, train

COPIES, ROUNDS = 10, 2
"""COPIES of the corpus of tokenize_bpe are about half a gigabyte."""


def seconds(corpus: str, tokenizer: str, out: str, workers: int) -> float:
    began = time.perf_counter()
    engine = ExecutorConfig(workers=workers)
    build(BuildConfig(inputs=(corpus,), out=out, tokenizer=tokenizer, engine=engine, rehash=True))
    took = time.perf_counter() - began
    shutil.rmtree(out)
    return took


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        part, corpus = Path(folder, "part.jsonl"), Path(folder, "corpus.jsonl")
        write_corpus(part)
        tokenizer = f"{folder}/tokenizer.json"
        train(TrainConfig(inputs=(str(part),), out=tokenizer, sample_bytes=TRAIN_ON))
        with corpus.open("wb") as out:
            for _ in range(COPIES):
                out.write(part.read_bytes())
        taken: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(ROUNDS):
            for workers, times in taken.items():
                times.append(seconds(str(corpus), tokenizer, f"{folder}/out", workers))
        one_process, two_processes = min(taken[1]), min(taken[2])
        size = corpus.stat().st_size / 1e6
        print(
            f"bpe 32k, {size:.0f} MB: {size / one_process:.1f} MB/s with one process, "
            f"{size / two_processes:.1f} with two: {one_process / two_processes:.2f}×"
        )


if __name__ == "__main__":
    main()
