"""Write a dataset of recall documents: needles and pairs like those of `trainer recall`.

    python -m benchmarks.hybrids.recall_documents data/text/train tokenizer.json data/recall/train

Models that train on text alone rarely recall. These documents are drawn as `trainer recall` draws
its examples, from seeds of their own and from the text that is trained on, so measured examples
never occur here. Lengths are uniform between SHORTEST and LONGEST tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pyarrow as pa

from headrace.dataplane.datasets.dataset import Dataset
from headrace.tokenize.index import IndexConfig, index
from headrace.trainer.scores.recall import SHORTEST, TASKS, Material

TOKENS = 4_000_000
LONGEST = 511
"""With its end token, a document fits a row of 512."""
DRAWN = ("needle", "mqar")
SEED = "training"
"""`trainer recall` seeds with numbers."""


def draw_documents(material: Material, end: int, num_tokens: int) -> Iterator[list[int]]:
    """Yield token ids of documents, needles and pairs in turns, until they have `num_tokens`."""
    count = number = 0
    while count < num_tokens:
        random = Random(f"{SEED}/{number}")
        length = random.randint(SHORTEST, LONGEST)
        task = TASKS[DRAWN[number % len(DRAWN)]]
        ids = [*task(material, random, length, random.random()).row.ids, end]
        yield ids
        count, number = count + len(ids), number + 1


def main(text: str, tokenizer: str, out: Path, num_tokens: int = TOKENS) -> None:
    dataset = Dataset(text)
    end = dataset.manifest.tokenizer.end_of_document
    assert end is not None
    documents = list(draw_documents(Material.read(dataset, LONGEST), end, num_tokens))
    out.mkdir(parents=True)
    table = pa.table({"tokens": pa.array(documents, pa.list_(pa.uint16()))})
    with pa.ipc.new_file(out / "recall.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=1000)
    manifest = index(IndexConfig(url=str(out), tokenizer=tokenizer, end_id=end))
    print(f"{len(documents):,} documents, {manifest.tokens:,} tokens in {out}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
