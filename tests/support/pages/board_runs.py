"""Folders of runs with a mixture of texts, written without training and without torch."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from support.data.corpora import texts
from support.data.small_data import plan_of, write_dataset

from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.dataplane.runlog import ledger
from headrace.dataplane.storage.sealed import seal
from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.mixtures.audit.auditor import Auditor
from headrace.mixtures.planning.open_plan import OpenedPlan
from headrace.trainer.checkpoints import store

SOURCES = ("web", "code")
LENGTH, BATCH = 64, 4
LAYOUT = {"engine": "FSDP2", "processes": 4, "pp": 1, "dp": 2, "cp": 1, "tp": 2, "ep": 1}
LAYOUT |= {"precision": "fp32", "device": "cpu", "threads": 1}
MODEL = {"parameters": 1000, "active_parameters": 1000, "layers": ["mamba", "mlp"] * 2}
MODEL |= {"note": "1K parameters in 4 layers", "pattern": "2*(mamba mlp)", "width": 64}
ABOUT = {
    "model": MODEL | {"vocab_size": 512},
    "layout": LAYOUT | {"degrees": "pp 1 × dp 2 × tp 2 × cp 1"},
    "fp8": "",
    "optimizer": "AdamW",
    "held_out": None,
    "schedule": None,
}
SIGNALS_EVERY = 3
STEPS = 20
"""Steps of the plan of the tests of the board."""


def write_texts(url: str, count: int, seed: int = 0) -> int:
    """Write a dataset of texts as bytes; return the size of the vocabulary."""
    tokenizer = ByteTokenizer(ByteConfig())
    result = texts(count, seed=seed, longest=120)
    documents = [np.array(tokenizer.encode([text]).tokens, np.uint16) for text in result]
    manifest = write_dataset(url, documents, fingerprint=tokenizer.info.fingerprint)
    manifests.save(url, replace(manifest, tokenizer=tokenizer.info))
    return tokenizer.info.vocab_size


def write_plan(folder: Path, steps: int) -> Plan:
    """Write two datasets of texts, and return the plan of two phases of both."""
    sources = {}
    for number, name in enumerate(SOURCES):
        url = str(folder / "data" / name)
        if not Path(url).exists():
            write_texts(url, steps * LENGTH * BATCH // 20 + 50, seed=number)
        sources[name] = {"data": url, "max_epochs": 4}
    row = {"seq_len": LENGTH, "batch": LENGTH * BATCH}
    half = steps // 2 * LENGTH * BATCH
    phases = {
        "stable": {"tokens": half, **row, "weights": {"web": 0.75, "code": 0.25}},
        "anneal": {"tokens": half, **row, "weights": {"web": 0.5, "code": 0.5}},
    }
    return plan_of({"seed": 7, "sources": sources, "phases": phases})


def write_run(root: Path, plan: Plan, *, lr: float = 1e-3, taken: int | None = None) -> Path:
    """Write a run that has taken some steps of the plan, with the true ledger."""
    taken = plan.steps if taken is None else taken
    (root / "checkpoints").mkdir(parents=True)
    plan.save(root / "plan.json")
    run = {"processes": 4, "device": "cpu", "precision": "fp32", "optimizer": {"lr": lr}, "seed": 3}
    (root / "run.yaml").write_text(yaml.safe_dump(run))
    (root / "model.yaml").write_text(yaml.safe_dump({"width": 64, "pattern": "2*(mamba mlp)"}))
    (root / "mixture.yaml").write_text(yaml.safe_dump({"seed": 7}))
    (root / "about.json").write_bytes(seal(ABOUT | {"lr": lr}))
    auditor, hashed, seconds = Auditor(OpenedPlan(Stream(plan))), plan.hash, 0.25
    with (root / "metrics.jsonl").open("w") as metrics, (root / "ledger.jsonl").open("w") as lines:
        for number in range(taken):
            step = plan.step(number)
            rows, _ = auditor.step(number)
            hashed = ledger.roll(hashed, bytes.fromhex("".join(row.tokens_hash for row in rows)))
            entry = {"step": number, "first_row": step.first_row, "rows": step.rows, "hash": hashed}
            lines.write(json.dumps(entry) + "\n")
            sources: dict[str, Any] = {}
            for row in rows:
                sums = sources.setdefault(row.source, {"loss": 0.0, "weight": 0.0, "rows": 0})
                sums["rows"] += 1
                sums["weight"] += LENGTH
                sums["loss"] = 2 + 3 / (1 + number) + 0.3 * (row.source == "web") + lr
            loss = sum(source["loss"] * source["rows"] for source in sources.values()) / len(rows)
            line = {
                "step": number,
                "row": step.end_row,
                "tokens": step.end_token,
                "phase": step.phase.name,
                "loss": loss + 2 * (number == 7),
                "lr": lr * min(1, (number + 1) / 10),
                "grad_norm": 1 + math.sin(number) / 4,
                "tokens_per_second": 1000.0 + number,
                "mfu": 0.41,
                "hfu": 0.45,
                "memory": 3_000_000_000,
                "data_wait": 0.01,
                "slowest_rank": 3,
                "slowest_lag": 0.05,
                "slowest_steps": 0,
                "seconds": seconds,
                "sources": sources,
            }
            metrics.write(json.dumps(line) + "\n")
    events: list[dict[str, Any]] = [
        {"time": 1e9, "event": "start", "step": 0, "layout": LAYOUT, "seconds": 1.0},
        {"time": 1e9 + 5, "event": "resume", "step": 5, "layout": LAYOUT, "seconds": 1.0},
    ]
    if taken == plan.steps:
        events.append({"time": 1e9 + 9, "event": "finish", "step": taken, "ledger": hashed})
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with (root / "evaluations.jsonl").open("w") as file:
        for number in range(4, taken, 5):
            held_out = {"loss": 3.0 - number / 100, "weight": 8.0, "rows": 1}
            entry = {"step": number, "tokens": plan.step(number).end_token}
            entry |= {"loss": held_out["loss"], "sources": dict.fromkeys(SOURCES, held_out)}
            file.write(json.dumps(entry) + "\n")
    with (root / "signals.jsonl").open("w") as file:
        for number in range(0, taken, SIGNALS_EVERY):
            place = {"step": number, "tokens": plan.step(number).end_token}
            layers = {f"blocks.{layer}": signals(number, layer) for layer in range(3)}
            file.write(json.dumps({**place, "layers": layers}) + "\n")
    return root


def signals(step: int, layer: int) -> dict[str, float]:
    """Return the signals of a layer in a step: two kinds, of which experts have one."""
    return {
        "activation_rms": 1.0 + layer + step / 10,
        **({"expert_max": 2.0 - layer / 4 + step / 100} if layer else {}),
    }


def write_checkpoint(run: Path, plan: Plan, step: int) -> None:
    """Write a sealed checkpoint with a file in place of tensors."""
    before = plan.step(step - 1)
    begun = store.temporary(run / "checkpoints", step, "token")
    store.begin(begun, None)
    state = store.RunState(
        step=step,
        row=before.end_row,
        tokens=before.end_token,
        plan_hash=plan.hash,
        updates=step,
        ledger="0" * 32,
        seed=3,
    )
    data = b"in place of tensors"
    (begun / store.TENSORS / "0").write_bytes(data)
    held = store.StoredFile(f"{store.TENSORS}/0", len(data), hashlib.sha256(data).hexdigest())
    store.commit(begun, run / "checkpoints" / store.name(step), (held,), state)


def write_scores(run: Path, steps: dict[int, float]) -> None:
    """Write scores of checkpoints: accuracies of a task, and what they recall."""
    with (run / "scores.jsonl").open("w") as file:
        for step, accuracy in steps.items():
            metrics = {"acc,none": accuracy, "acc_stderr,none": 0.01}
            asked: dict[str, Any] = {"asked": ["arc <easy>"], "failed": {}}
            scored = {"arc <easy>": {"metrics": metrics}}
            entry = {"step": step, "time": 1e9, **asked, "tasks": scored}
            file.write(json.dumps(entry) + "\n")
    last = [{"length": 512, "accuracy": 0.75, "loss": 0.5, "answers": 64}]
    entry = {"step": max(steps), "time": 1e9, "tasks": {"needle": last}}
    (run / "recall.jsonl").write_text(json.dumps(entry) + "\n")
