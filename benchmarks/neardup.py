"""Near-duplicates by MinHash, compared with datatrove on the same corpus.

    python -m benchmarks.neardup                prints the speeds and what both find

The corpus is code and prose of installed packages, and copies of documents in which some words were
changed. Both take runs of five words of the same words, 14 bands and 8 rows. Each runs in its own
process, pinned to one core; the figures compare CPU seconds after the imports. datatrove's word
tokenizer is replaced by str.split: its own models for English are far slower.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import tokenize_bpe

MEGABYTES = 16
COPIES = 1500
RATES = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08)
"""Shares of the words of a copy that are changed."""
WORDS = 60, 4000
"""Words of documents that are copied."""
NGRAM = 5
IMPORTS = {
    "ours": ("pandas", "rensa", "headrace.tokenize.neardup.find"),
    "ours_again": ("pandas", "rensa", "headrace.tokenize.neardup.find"),
    "datatrove": ("importlib.metadata", "datatrove.executor", "datatrove.pipeline.dedup.minhash"),
}


def write_corpus(path: Path) -> list[tuple[int, int]]:
    """Write the corpus; return the numbers of copied documents and of their copies."""
    rng = random.Random(0)
    tokenize_bpe.MEGABYTES = MEGABYTES
    tokenize_bpe.write_corpus(path)
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    rng.shuffle(texts)
    able = [k for k, text in enumerate(texts) if WORDS[0] < len(text.split()) < WORDS[1]]
    pairs = []
    for number, k in enumerate(rng.sample(able, min(COPIES, len(able)))):
        rate = RATES[number % len(RATES)]
        words = [w if rng.random() > rate else f"x{rng.random()}" for w in texts[k].split()]
        pairs.append((k, len(texts)))
        texts.append(" ".join(words))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return pairs


def ours(corpus: str, out: str, seed: int = 1) -> None:
    from headrace.tokenize.executors import ExecutorConfig
    from headrace.tokenize.neardup.find import NeardupConfig, find_neardups
    from headrace.tokenize.neardup.lsh import LshConfig

    find_neardups(
        NeardupConfig(
            inputs=(corpus,),
            out=f"{out}.parquet",
            lsh=LshConfig(ngram=NGRAM, seed=seed),
            engine=ExecutorConfig(workers=1),
        )
    )


def ours_again(corpus: str, out: str) -> None:
    ours(corpus, out, seed=2)


def datatrove(corpus: str, out: str) -> None:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import minhash
    from datatrove.utils.text import TextNormConfig

    class Split:
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

    def read(data: object, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        with Path(corpus).open() as lines:
            for number, line in enumerate(lines):
                yield Document(text=json.loads(line)["text"], id=str(number))

    words: Any = Split()
    minhash.load_word_tokenizer = lambda language: words
    norm = TextNormConfig(norm_numbers=False, norm_unicode_diacritics=False)
    config = minhash.MinhashConfig(n_grams=NGRAM, norm_config=norm)
    steps = (
        ([read, minhash.MinhashDedupSignature(f"{out}/signatures", config)], 1),
        ([minhash.MinhashDedupBuckets(f"{out}/signatures", f"{out}/dups", config=config)], 14),
        ([minhash.MinhashDedupCluster(f"{out}/dups", f"{out}/found", config, True)], 1),
    )
    for number, (pipeline, tasks) in enumerate(steps):
        LocalPipelineExecutor(
            pipeline=pipeline, tasks=tasks, workers=1, logging_dir=f"{out}/logs{number}"
        ).run()


WAYS: dict[str, Callable[[str, str], None]] = {
    "ours": ours,
    "ours_again": ours_again,
    "datatrove": datatrove,
}


def clusters(name: str, out: str) -> dict[int, int]:
    """Return the cluster of each document that is in one."""
    if name != "datatrove":
        from headrace.tokenize.neardup import results

        table = results.read_table(
            f"{out}.parquet", results.load_required(f"{out}.parquet"), "clusters"
        ).to_pydict()
        return dict(zip(table["document"], table["cluster"], strict=True))
    data = Path(f"{out}/found/000000.clusters").read_bytes()
    return dict(struct.iter_unpack("<II", data))


def measure(name: str, folder: str) -> None:
    """Run one package in this process; print its CPU seconds as the last line."""
    for package in IMPORTS[name]:
        importlib.import_module(package)
    began = time.process_time()
    WAYS[name](f"{folder}/corpus.jsonl", f"{folder}/{name}")
    print(time.process_time() - began)


def main() -> None:
    os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    core = str(min(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        planted = write_corpus(corpus)
        texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
        size = sum(len(text.encode()) for text in texts) / 1e6
        speeds, result = {}, {}
        for name in WAYS:
            command = ["taskset", "-c", core, sys.executable, "-m", "benchmarks.neardup"]
            run = subprocess.run([*command, name, folder], capture_output=True, text=True)
            if run.returncode:
                raise SystemExit(f"{name} failed: {run.stderr[-2000:]}")
            speeds[name] = size / float(run.stdout.split()[-1])
            result[name] = clusters(name, f"{folder}/{name}")
        ratio = speeds["ours"] / speeds["datatrove"]
        print(
            f"neardup, {len(texts):,} documents, {size:.0f} MB: {speeds['ours']:.1f} MB per CPU "
            f"second, {ratio:.1f}× of datatrove ({speeds['datatrove']:.2f})"
        )
        for name in ("datatrove", "ours_again"):
            our_ids, peer_ids = set(result["ours"]), set(result[name])
            shared = len(our_ids & peer_ids) / len(our_ids | peer_ids)
            print(
                f"documents with a near-duplicate: {len(our_ids):,}, {name.replace('_', ' ')} "
                f"{len(peer_ids):,}; in both {shared:.1%} of either"
            )
        show_planted(texts, planted, result)


def show_planted(
    texts: list[str], planted: list[tuple[int, int]], clusters: dict[str, dict[int, int]]
) -> None:
    """Print how many planted pairs are found, beside the curve. Similarities are those of our
    words; datatrove cuts words at punctuation, so its own are others."""
    from headrace.tokenize.neardup.lsh import LshConfig
    from headrace.tokenize.neardup.show import similarity

    sums: dict[float, defaultdict[str, float]] = {}
    for first, second in planted:
        exact = similarity(texts[first], texts[second], NGRAM)
        counter = sums.setdefault(min(0.9, int(exact * 10) / 10), defaultdict(float))
        counter["pairs"] += 1
        counter["curve"] += LshConfig().probability(exact)
        for name, cluster in clusters.items():
            counter[name] += first in cluster and cluster[first] == cluster.get(second)
    for low, counter in sorted(sums.items()):
        pairs = counter["pairs"]
        print(
            f"planted pairs of similarity {low:.1f}–{low + 0.1:.1f}: {pairs}; found "
            f"{counter['ours'] / pairs:.1%}, datatrove {counter['datatrove'] / pairs:.1%}, curve "
            f"{counter['curve'] / pairs:.1%}"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(*sys.argv[1:])
    else:
        main()
