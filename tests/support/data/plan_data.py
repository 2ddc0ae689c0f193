"""Plans without shards: dataset heads, folders of runs, and a slow count of served tokens."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np

from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.datasets.manifest import Generation, Manifest, TokenizerInfo
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.dataplane.storage import storage


def write_head(
    url: str, *tokens: int, fingerprint: str = "test", vocab_size: int = 512, shards: int = 1
) -> str:
    """Append generations of these sizes to a dataset without shards; return its URL."""
    if storage.exists(storage.join(url, manifests.NAME)):
        manifest = manifests.load(url)
    else:
        tokenizer = TokenizerInfo(
            kind="byte", fingerprint=fingerprint, vocab_size=vocab_size, end_of_document=0
        )
        manifest = Manifest(format="arrow", dtype="uint16", tokenizer=tokenizer)
    for count in tokens:
        last = url.rstrip("/").rsplit("/", 1)[-1]
        name = hashlib.sha256(f"{last} {len(manifest.generations)}".encode()).hexdigest()
        manifest = manifest.append(
            Generation(
                documents=max(1, count // 100),
                tokens=count,
                size=2 * count,
                shards=shards,
                table=f"tables/{name[:32]}.arrow",
                table_hash=name,
            )
        )
    manifests.save(url, manifest)
    return url


def served(plan: Plan, first: int | None = None, last: int | None = None) -> Counter[tuple]:
    """Count how often each (source, epoch, token) is an input of the rows [first, last)."""
    stream = Stream(plan)
    first = plan.first_row if first is None else first
    last = plan.end_row if last is None else last
    inputs: Counter[tuple] = Counter()
    for phase in plan.phases:
        rows = np.arange(max(first, phase.first_row), min(last, phase.end_row))
        if not len(rows):
            continue
        located = stream.locate(rows)
        places = zip(located.sources.tolist(), located.epochs.tolist(), strict=True)
        for place, (source, epoch) in enumerate(places):
            name, spans = plan.sources[source].name, located.spans(place)
            assert sum(end - start for start, end in spans) == phase.seq_len
            inputs.update((name, epoch, token) for span in spans for token in range(*span))
    return inputs


def write_run(folder: Path, plan: Plan, steps: int | None = None) -> Path:
    """Write a run folder as far as mixtures read it: a plan, and a checkpoint at a step."""
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    if steps is not None:
        (folder / "checkpoints" / f"step-{steps:08d}").mkdir(parents=True)
    return folder


def write_taken_run(
    folder: Path, plan: Plan, steps: int, *, checkpoints: tuple[int, ...] = ()
) -> Path:
    """Write a run's plan, a ledger with so many steps, and checkpoint folders."""
    folder.mkdir(parents=True)
    plan.save(folder / "plan.json")
    taken = [plan.step(number) for number in range(plan.first_step, plan.first_step + steps)]
    entries = [
        {"step": step.number, "first_row": step.first_row, "rows": step.rows, "hash": "0" * 32}
        for step in taken
    ]
    write_ledger(folder, entries)
    for step_number in checkpoints:
        (folder / "checkpoints" / f"step-{step_number:08d}").mkdir(parents=True)
    return folder


def write_ledger(folder: Path, entries: list[dict[str, object]]) -> None:
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in entries))
