"""Folders of long runs, written without training: the files that the board and the report read."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.data.corpora import texts
from support.data.small_data import plan_of, write_dataset

from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.trainer.accounting import about
from headrace.trainer.run import resolve
from headrace.trainer.run.request import RunRequest

SOURCES = tuple(f"source-{number}" for number in range(8))
MODEL = str(Path(__file__).parents[1] / "tests/support/configs/tiny.yaml")
LENGTH, ROWS = 64, 64
SPIKES = 50
TAILS = 20_000
"""Lines differ in their numbers; after so many, the numbers repeat."""


def write(root: Path, steps: int, seed: int = 0) -> Path:
    """Write a run of so many steps with eight sources: 20 curves, one of them held-out loss."""
    rng = np.random.default_rng(seed)
    root.mkdir(parents=True)
    (root / "checkpoints").mkdir()
    plan = _plan(root.parent / "data", steps)
    words = [f"synthetic.steps={steps}", f"optimizer.lr={1e-3 * (1 + seed)}"]
    request = RunRequest(model=MODEL, out=str(root), overrides=words)
    job = replace(resolve.resolve(request), plan=plan, mixture={"sources": list(SOURCES)})
    job.save()
    about.save_facts(job)
    layout = {"engine": "FSDP2", "processes": 8, "pp": 1, "dp": 8, "cp": 1, "tp": 1, "ep": 1}
    layout |= {"precision": "bf16", "device": "cuda", "threads": 1}
    start = {"time": 1e9, "event": "start", "step": 0, "layout": layout, "seconds": 9.0}
    (root / "events.jsonl").write_text(json.dumps(start) + "\n")
    spikes = set(rng.integers(0, steps, SPIKES).tolist())
    tails = [_tail(0, rng) for _ in range(min(steps, TAILS))]
    with (root / "metrics.jsonl").open("w") as file, (root / "ledger.jsonl").open("w") as ledger:
        for step in range(steps):
            tail = _tail(9, rng) if step in spikes else tails[step % TAILS]
            row = ROWS * (step + 1)
            file.write(f'{{"step": {step}, "row": {row}, "tokens": {LENGTH * row}, {tail}')
            ledger.write(
                f'{{"step": {step}, "first_row": {ROWS * step}, "rows": {ROWS}, '
                f'"hash": "{step:032x}"}}\n'
            )
    with (root / "evaluations.jsonl").open("w") as file:
        for step in range(99, steps, 100):
            tokens = LENGTH * ROWS * (step + 1)
            entry = {"step": step, "tokens": tokens, "loss": 2.0, "sources": {}}
            file.write(json.dumps(entry) + "\n")
    return root


def _plan(folder: Path, steps: int) -> Plan:
    """Return the plan of one phase of eight sources, which are small and repeated."""
    tokenizer = ByteTokenizer(ByteConfig())
    sources: dict[str, Any] = {}
    for number, name in enumerate(SOURCES):
        url = str(folder / name)
        documents = [
            np.array(tokenizer.encode([text]).tokens, np.uint16)
            for text in texts(500, seed=number, longest=400)
        ]
        manifest = write_dataset(url, documents, fingerprint=tokenizer.info.fingerprint)
        manifests.save(url, replace(manifest, tokenizer=tokenizer.info))
        sources[name] = {"data": url, "max_epochs": 10**6}
    batch = {"seq_len": LENGTH, "batch": LENGTH * ROWS}
    weights = dict.fromkeys(SOURCES, 1 / len(SOURCES))
    phase = {"tokens": steps * LENGTH * ROWS, **batch, "weights": weights}
    return plan_of({"seed": 7, "sources": sources, "phases": {"synthetic": phase}})


def _tail(spike: float, rng: np.random.Generator) -> str:
    """Return the rest of a line of metrics, as a run writes it."""
    a, b, c = rng.standard_normal(3).tolist()
    loss = 2 + 0.02 * a + spike
    sources = ", ".join(
        f'"{name}": {{"loss": {loss + number / 10 + 0.01 * b:.15f}, "weight": 8192.0, "rows": 8}}'
        for number, name in enumerate(SOURCES)
    )
    return (
        f'"phase": "synthetic", "loss": {loss:.15f}, "lr": 0.0003, '
        f'"grad_norm": {1 + 0.1 * abs(c):.15f}, "tokens_per_second": {90000 + 900 * b:.1f}, '
        f'"mfu": {0.41 + 0.01 * b:.15f}, "hfu": {0.45 + 0.01 * b:.15f}, "memory": 71234567890, '
        f'"data_wait": {0.002 * abs(a):.6f}, "seconds": {0.7 + 0.01 * abs(b):.6f}, '
        f'"expert_load": {1.2 + 0.01 * abs(b):.4f}, "sources": {{{sources}}}}}\n'
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
