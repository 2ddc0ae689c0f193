"""Corpus and mixture of the golden runs: made from a seed, the same on each machine.

The corpus has two sources: sentences of made-up words, and DNA with masked repeats, whose
lower-case bases get a loss weight of 0.1. Documents are short, so that most rows hold several.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random

SEED = 13
SENTENCES, SEQUENCES = 4000, 1200
SYLLABLES = ("ka", "lo", "mi", "ren", "tu", "sa", "vor", "el", "in", "do", "shu", "ba")
BUILDS = {
    "text": ("text.jsonl", "--tokenizer", "byte"),
    "dna": ("dna.fa", "--tokenizer", "byte", "--dna"),
}
"""Arguments of `tokenize build` by source."""

TOTAL_STEPS = 2000
MIXTURE = """\
seed: 5
sources:
  text: {{data: data/text, max_epochs: 8}}
  dna: {{data: data/dna, max_epochs: 8}}
phases:
  first:
    tokens: {first}
    seq_len: {length}
    batch: {first_batch}
    weights: {{text: 0.75, dna: 0.25}}
    lr: {{warmup: {first}}}
  second:
    tokens: {second}
    seq_len: {double}
    batch: {second_batch}
    weights: {{text: {{from: 0.75, to: 0.25}}, dna: {{from: 0.25, to: 0.75}}}}
  third:
    tokens: {third}
    seq_len: {length}
    batch: {third_batch}
    weights: {{second: 0.5, text: 0.5}}
    lr: {{shape: cosine, end: 0.1}}
"""
"""Steps 0–7: 4 rows. Steps 8–15: 3 rows of twice the length (two micro-batches in one process,
a row of padding on two data-parallel ranks). The rest: 2 rows, a replay, a falling learning rate.
"""
FIRST_STEPS, SECOND_STEPS = 8, 8


def write_corpus(folder: Path) -> None:
    """Write the input files of `tokenize build`."""
    random = Random(SEED)

    def draw_below(limit: int) -> int:
        return int(random.random() * limit)  # random() alone has the same values in each Python

    words = [
        "".join(SYLLABLES[draw_below(12)] for _ in range(1 + draw_below(3))) for _ in range(300)
    ]
    with (folder / BUILDS["text"][0]).open("w", encoding="ascii", newline="\n") as file:
        for _ in range(SENTENCES):
            count = 2 + draw_below(16)
            sentence = " ".join(words[int(300 * random.random() ** 3)] for _ in range(count))
            file.write(json.dumps({"text": f"{sentence}."}) + "\n")
    repeat = "".join("acgt"[draw_below(4)] for _ in range(40))
    with (folder / BUILDS["dna"][0]).open("w", encoding="ascii", newline="\n") as file:
        for number in range(SEQUENCES):
            bases = ["ACGT"[draw_below(4)] * (1 + draw_below(3)) for _ in range(5 + draw_below(60))]
            bases.insert(draw_below(len(bases)), repeat[: draw_below(40)])
            file.write(f">sequence-{number}\n{''.join(bases)}\n")


def mixture(length: int) -> str:
    """Return the mixture's YAML; `length` is the number of tokens in a row of the first phase."""
    first_batch, second_batch, third_batch = 4 * length, 3 * 2 * length, 2 * length
    third_steps = TOTAL_STEPS - FIRST_STEPS - SECOND_STEPS
    return MIXTURE.format(
        length=length,
        double=2 * length,
        first=FIRST_STEPS * first_batch,
        second=SECOND_STEPS * second_batch,
        third=third_steps * third_batch,
        first_batch=first_batch,
        second_batch=second_batch,
        third_batch=third_batch,
    )


def digest(folder: Path, length: int) -> str:
    """Return a hash of the corpus files and the mixture."""
    state = hashlib.blake2b(mixture(length).encode(), digest_size=16)
    for name, *_ in BUILDS.values():
        state.update((folder / name).read_bytes())
    return state.hexdigest()
