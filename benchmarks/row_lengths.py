"""Steps by length, beside packing and concatenation: padding, documents cut, CPU time.

    python -m benchmarks.row_lengths

Lengths of documents are log-normal, like those of web and code corpora (packing.py). Steps by
length are the views of `tokenize pack --length 256,512,…`. Two alternatives are computed: each
document alone in the shortest row that holds it, and pieces whose lengths are powers of two, as in
Dataset Decomposition (Pouransari et al. 2024). The times are of training steps with equal tokens
and isolated documents, by one thread; a row length counts by its share of the tokens.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from headrace.dataplane.arrays import Int64
from headrace.models.config.config import load_model_config
from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.tokenize.views.pack import PackConfig, pack_shard

from .packing import LOG_NORMAL, cut_by_concatenation

LENGTHS = (256, 512, 1024, 2048, 4096)
LONGEST = LENGTHS[-1]
DOCUMENTS = 100_000
PATTERNS = ("attention", "mamba", "se", "li")
REPEATS = 5
Bins = tuple[int, list[Int64]]
"""Tokens of a bin, and the bounds of the documents in each."""


def pack_all(documents: Int64, lengths: tuple[int, ...]) -> tuple[list[Bins], list[dict[str, int]]]:
    bins, all_counts = [], []
    for length in lengths:
        several = lengths if len(lengths) > 1 else ()
        config = PackConfig(dataset="a", length=length, lengths=several, out="b")
        pieces, counts = pack_shard(documents, config, "a shard")
        ends = np.cumsum(pieces.tokens + pieces.padding)
        edges = np.unique(np.concatenate([[0], ends, np.arange(0, ends[-1] + 1, length)]))
        bins.append((length, np.split(edges, np.flatnonzero(edges % length == 0)[1:])))
        all_counts.append(counts)
    return bins, all_counts


def report_rows(name: str, documents: Int64) -> list[Bins]:
    total, tokens = len(documents), int(documents.sum())
    long = float(np.mean(documents > LONGEST))
    cut, _ = cut_by_concatenation(documents, LONGEST)
    print(f"row lengths, {name}: concatenated to {LONGEST:,}: {cut / total:.2%} of documents cut")
    packed, (counts,) = pack_all(documents, (LONGEST,))
    padding = counts["padding"] / (counts["bins"] * LONGEST)
    print(f"row lengths, {name}: packed to {LONGEST:,}: {long:.2%} cut, {padding:.2%} padding")
    by_length, all_counts = pack_all(documents, LENGTHS)
    sizes = [counts["bins"] * length for counts, length in zip(all_counts, LENGTHS, strict=True)]
    padding = sum(counts["padding"] for counts in all_counts) / sum(sizes)
    shares = ", ".join(
        f"{size / sum(sizes):.1%} in rows of {length:,}"
        for size, length in zip(sizes, LENGTHS, strict=True)
    )
    print(
        f"row lengths, {name}: by length: {long:.2%} cut, {padding:.2%} padding; tokens: {shares}"
    )
    rests = documents % LONGEST
    rows = int((documents - rests).sum()) + int(
        np.array(LENGTHS)[np.searchsorted(LENGTHS, rests[rests > 0])].sum()
    )
    print(
        f"row lengths, {name}: alone in the shortest row: {long:.2%} cut, "
        f"{1 - tokens / rows:.2%} padding"
    )
    pieces = (documents > LENGTHS[0]) & ~np.isin(documents, LENGTHS)
    print(f"row lengths, {name}: in pieces of powers of two: {pieces.mean():.2%} cut")
    return [*packed, *by_length]


def step_seconds(model: Model, shape: tuple[int, int], bounds: list[Int64]) -> float:
    length = shape[1]
    edges = [
        row * length + edge % length for row, part in enumerate(bounds) for edge in part.tolist()
    ]
    cu_seqlens = torch.tensor(sorted({*edges, shape[0] * length}), dtype=torch.int32)
    tokens = torch.randint(0, 512, shape)
    started = time.process_time()
    model(tokens, Documents.build(cu_seqlens, shape)).sum().backward()
    return time.process_time() - started


def main() -> None:
    rng = np.random.default_rng(0)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, (mean, deviation) in LOG_NORMAL.items():
        documents = np.maximum(1, rng.lognormal(mean, deviation, DOCUMENTS)).astype(np.int64)
        packed, *by_length = report_rows(name, documents)
        ends = np.cumsum(documents)
        edges = np.unique(np.concatenate([[0], ends, np.arange(0, ends[-1], LONGEST)]))
        concatenated = np.split(edges, np.flatnonzero(edges % LONGEST == 0)[1:])
        all_bins = [(LONGEST, concatenated), packed, *by_length]
        sizes = np.array([length * len(bins) for length, bins in by_length], float)
        for pattern in PATTERNS:
            model = Model(load_model_config("tiny-hybrid", [f"pattern='[{pattern}]'"]))
            model.init_weights(0)
            seconds: list[list[float]] = [[] for _ in all_bins]
            for _ in range(REPEATS):  # in turns: all meet the same load of the machine
                for times, (length, bins) in zip(seconds, all_bins, strict=True):
                    rows = LONGEST // length
                    chosen = [bins[n] for n in rng.integers(len(bins) - 1, size=rows).tolist()]
                    times.append(step_seconds(model, (rows, length), chosen))
            whole, pack, *lengths = map(statistics.median, seconds)
            mixed = float(np.average(lengths, weights=sizes))
            print(
                f"row lengths, {name}, {pattern}: tokens a CPU second, beside concatenation: "
                f"packed {whole / pack:.2f}x, by length {whole / mixed:.2f}x"
            )


if __name__ == "__main__":
    main()
