"""Packing whole documents into rows, beside concatenation: documents cut, padding, seconds.

    python -m benchmarks.packing

Real lengths are those of datasets that this script builds: Python files, and prose (descriptions
and docstrings of installed packages). Log-normal lengths resemble those of web and code corpora. A
document is cut if its tokens are in several rows. The limit of packing is the number of rows that
the pieces would fill without padding. The peer is the algorithm of the paper (Ding et al. 2024),
which places one piece at a time by a segment tree over the rooms of the bins. Seconds are those of
the CPU.
"""

from __future__ import annotations

import ast
import json
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headrace.dataplane.arrays import Int64
from headrace.dataplane.datasets.dataset import Dataset
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.train import TrainConfig, train
from headrace.tokenize.views.pack import PackConfig, pack, pack_shard

LENGTHS = (2048, 4096, 8192)
GROUPS = (64, 256, 1024, 4096)
MEGABYTES = {"Python files": 32, "prose": 6}
LOG_NORMAL = {"web": (6.2, 1.1), "code": (6.5, 1.4)}
"""Mean and deviation of the logarithm: 900 and 1,770 tokens on average."""
DOCUMENTS = 300_000
ONE = ExecutorConfig(workers=1)


def python_files() -> Iterator[str]:
    files = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    for number in np.random.default_rng(0).permutation(len(files)).tolist():
        yield files[number].read_text(errors="ignore")


def prose() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["purelib"])
    for file in sorted(library.glob("*.dist-info/METADATA")):
        yield file.read_text(errors="ignore")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for text in python_files():
        try:
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
        except (SyntaxError, ValueError, RecursionError):
            continue
        yield "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def built(folder: Path, name: str, texts: Iterator[str], max_characters: int) -> str:
    """Build a dataset of about `max_characters` characters; return its URL."""
    size, corpus = 0, folder / f"{name}.jsonl"
    with corpus.open("w") as out:
        while size < max_characters and (text := next(texts, None)) is not None:
            out.write(json.dumps({"text": text}) + "\n")
            size += len(text)
    tokenizer, url = folder / "tokenizer.json", str(folder / name)
    if not tokenizer.exists():
        train(TrainConfig(inputs=(str(corpus),), out=str(tokenizer), sample_bytes=8 << 20))
    build(
        BuildConfig(inputs=(str(corpus),), out=url, tokenizer=str(tokenizer), shuffle=1, engine=ONE)
    )
    return url


def cut_by_concatenation(lengths: Int64, length: int) -> tuple[int, int]:
    """Return the documents that lie in several rows, and those of them that a row could hold."""
    ends = np.cumsum(lengths)
    cut = (ends - lengths) // length != (ends - 1) // length
    return int(cut.sum()), int((cut & (lengths <= length)).sum())


def report(name: str, lengths: Int64, length: int, counts: dict[str, int], spent: str) -> None:
    cut, needless = cut_by_concatenation(lengths, length)
    total, bins = len(lengths), counts["bins"]
    fewest = -(-int(lengths.sum()) // length)
    print(
        f"packing {name} to {length:,}: {counts['long'] / total:.2%} of {total:,} documents cut, "
        f"{counts['padding'] / (bins * length):.3%} padding, {bins / fewest:.4f}x of the fewest "
        f"rows; concatenated: {cut / total:.2%} cut, {needless / total:.2%} needlessly{spent}"
    )


def by_segment_tree(lengths: list[int], capacity: int) -> int:
    """Pack pieces one at a time, the longest first; return the number of bins."""
    width = 1 << capacity.bit_length()
    some = [0] * (2 * width)
    """Bins with a room, at the leaf width + room; a node holds the sum of its children."""
    bins = 0

    def add(room: int, count: int) -> None:
        node = width + room
        while node:
            some[node] += count
            node //= 2

    for length in lengths:
        node = width + length
        while node and not some[node]:
            while node and node % 2:
                node //= 2
            node += node > 0
        while 0 < node < width:
            node = 2 * node + (some[2 * node] == 0)
        room = node - width if node else capacity
        bins += not node
        if node:
            add(room, -1)
        add(room - length, 1)
    return bins


def synthetic() -> None:
    for name, (mean, deviation) in LOG_NORMAL.items():
        draws = np.random.default_rng(0).lognormal(mean, deviation, DOCUMENTS)
        lengths = np.maximum(2, draws).astype(np.int64)
        for length in LENGTHS:
            counts, spent = packed(lengths, PackConfig(dataset=name, out=name, length=length))
            report(
                f"log-normal {name}",
                lengths,
                length,
                counts,
                f"; {spent / DOCUMENTS * 1e6:.2f} s for a million documents",
            )
        for bins in GROUPS:
            config = PackConfig(dataset=name, out=name, length=4096, group_bins=bins)
            counts, spent = packed(lengths, config)
            share = counts["padding"] / (counts["bins"] * 4096)
            print(
                f"packing log-normal {name}, groups of {bins:,} bins: {share:.3%} padding; "
                f"{spent / DOCUMENTS * 1e6:.2f} s for a million documents"
            )
        pieces = np.sort(lengths[lengths <= 4096])[::-1][::6]
        start = time.process_time()
        peer = by_segment_tree(pieces.tolist(), 4096)
        one_by_one = time.process_time() - start
        config = PackConfig(dataset=name, out=name, length=4096, group_bins=1 << 30)
        counts, spent = packed(pieces, config)
        assert counts["bins"] == peer
        print(
            f"packing log-normal {name}, {len(pieces):,} pieces in one group: "
            f"{one_by_one / spent:.1f}x as fast as the segment tree, {peer:,} bins by both"
        )


def packed(lengths: Int64, config: PackConfig) -> tuple[dict[str, int], float]:
    start = time.process_time()
    _, counts = pack_shard(lengths, config, "benchmark")
    return counts, time.process_time() - start


def real(folder: Path) -> None:
    for name, texts in (("Python files", python_files()), ("prose", prose())):
        url = built(folder, name.split()[0].lower(), texts, MEGABYTES[name] << 20)
        dataset = Dataset(url)
        lengths = np.concatenate(
            [
                dataset.open_shard(number).layout.document_tokens
                for number in range(len(dataset.shards))
            ]
        )
        for length in LENGTHS:
            out = f"{url}-{length}"
            start = time.process_time()
            result = pack(PackConfig(dataset=url, out=out, length=length, engine=ONE))
            spent = time.process_time() - start
            counts = result.generations[0].provenance["pack"]
            duration = (
                f"; {spent / len(lengths) * 1e6:.2f} s for a million documents, with the files"
            )
            report(name, lengths, length, counts, duration)


def main() -> None:
    synthetic()
    with tempfile.TemporaryDirectory() as folder:
        real(Path(folder))


if __name__ == "__main__":
    main()
