"""The cost of decontamination in a build, and its speed beside sets of n-grams in plain Python.

    python -m benchmarks.decontamination        prints a line per tokenizer, and one for the sets

The evaluations have 20,000 documents of 40 words. The figures are CPU seconds of one process on one
core: those of the rule, and those of the build that it is part of. The sets do what lm-eval's test
does: lower case, no punctuation, white space, a set of 13-grams.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import tokenize_bpe
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.corpus.decontaminate import StoredEvaluations
from headrace.tokenize.corpus.evaluations import EvaluationConfig
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.train import TrainConfig, train

MEGABYTES, ROUNDS, NGRAM = 12, 3, 13
DOCUMENTS, WORDS = 20_000, 40
PLAIN = str.maketrans("", "", string.punctuation)


def write_evaluations(path: Path) -> list[str]:
    """Write documents of words that the corpus has too."""
    words = Path(os.__file__).read_text().split()
    rng = random.Random(0)
    texts = [" ".join(rng.choices(words, k=WORDS)) for _ in range(DOCUMENTS)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def ngrams(text: str) -> set[tuple[str, ...]]:
    words = text.lower().translate(PLAIN).split()
    return {tuple(words[k : k + NGRAM]) for k in range(len(words) - NGRAM + 1)}


def seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


class Spent:
    """Adds up the CPU seconds of a function of builds in this process."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        function = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            began = time.process_time()
            result = function(*arguments)
            self.seconds += time.process_time() - began
            return result

        setattr(owner, name, timed)


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, evals = folder / "corpus.jsonl", folder / "evals.jsonl"
        tokenize_bpe.MEGABYTES = MEGABYTES
        tokenize_bpe.write_corpus(corpus)
        bpe = str(folder / "tokenizer.json")
        train(TrainConfig(inputs=(str(corpus),), out=bpe, sample_bytes=4 << 20))
        known = set().union(*map(ngrams, write_evaluations(evals)))
        config = EvaluationConfig(evaluations=(str(evals),), ngram=NGRAM, fields=("text",))
        texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
        size = sum(len(text.encode()) for text in texts) / 1e6
        rule = Spent(StoredEvaluations, "apply")
        reading = Spent(sys.modules[build.__module__], "read_evaluations")
        speed: dict[str, float] = {}
        for label, tokenizer in (("bpe", bpe), ("byte", "byte")):
            taken: list[tuple[float, float]] = []
            for _ in range(ROUNDS + 1):  # the first round warms up
                result = BuildConfig(
                    inputs=(str(corpus),),
                    out=str(folder / "out"),
                    tokenizer=tokenizer,
                    decontaminate=config,
                    engine=ExecutorConfig(workers=1),
                )
                rule.seconds = reading.seconds = 0.0
                whole = seconds(partial(build, result))
                taken.append((rule.seconds, whole - rule.seconds - reading.seconds))
                shutil.rmtree(folder / "out")
            more, without = map(statistics.median, zip(*taken[1:], strict=True))
            speed[label] = size / more
            print(
                f"decontamination, {label}: {more / without:.0%} on top of the CPU seconds of a "
                f"build ({size / without:.1f} MB per second), {speed[label]:.0f} MB per CPU second"
            )
        sets = size / seconds(lambda: [not known.isdisjoint(ngrams(text)) for text in texts])
        print(
            f"decontamination, {len(known):,} n-grams: {speed['bpe'] / sets:.1f}× of sets in "
            f"Python ({sets:.1f} MB per CPU second); reading the evaluations takes "
            f"{reading.seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
