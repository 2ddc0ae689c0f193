"""Counts of a training step on a GPU, without a GPU: launches, FLOPs, bytes, waits, saved bytes.

python -m benchmarks.step_counts [MODEL …] [--top 6]

A step is the real one: the loop, FSDP2 on one rank, bf16 with fp32 masters, clipping, AdamW, one
micro-batch of one row of 16,384 tokens, on the fake device of _fake_gpu.py. Packed rows hold
documents of log-normal lengths (median 700). _launch_kinds.py defines the classes and the rates.
Bytes are lower bounds: each argument of a launch counts once. Nothing here is a measurement.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend `fake`
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import HashStore

from headrace.models.accounting.count import build_meta
from headrace.models.config import ModelConfig, load_model_config
from headrace.models.precision import PRECISIONS
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import join
from headrace.trainer.loop.guard import Guard
from headrace.trainer.loop.loop import Loop, LoopOptions, StepRecord
from headrace.trainer.loop.synthetic import (
    SyntheticBatch,
    SyntheticConfig,
    SyntheticLoader,
    SyntheticPlan,
)

from ._fake_gpu import FakeGpu, Launch, Wait, fake_gpu
from ._launch_kinds import BYTES, FLOPS, kind_of

MODELS = (
    *("transformer-1b", "hybrid-1b", "mamba2-1.3b", "evo2-7b-8k", "zamba2-1.2b"),
    "blackmamba-1.5b",
)
TOKENS = 16_384
MEDIAN, SPREAD = 700, 1.0
"""Median length of a document, and standard deviation of its logarithm."""


@dataclass(frozen=True)
class Counts:
    """Counts of one step."""

    launches: list[Launch]
    waits: list[Wait]
    saved: int
    """Bytes that the forward pass keeps for the backward pass, weights left out."""

    def bytes(self, *kinds: str) -> int:
        return sum(each.bytes for each in self.launches if kind_of(each) in kinds)

    @property
    def gemm_flops(self) -> int:
        return sum(each.flops for each in self.launches if kind_of(each) == "GEMM")

    @property
    def gemm_time(self) -> float:
        return self.gemm_flops / FLOPS

    @property
    def glue_time(self) -> float:
        return self.bytes("glue") / BYTES

    @property
    def pass_bytes(self) -> int:
        """Bytes of the forward and backward passes."""
        return self.bytes("GEMM", "attention", "kernel", "glue")


def documents(tokens: int, seed: int = 0) -> list[int]:
    """Return the boundaries of documents of log-normal lengths in a row."""
    generator = torch.Generator().manual_seed(seed)
    ends = [0]
    while ends[-1] < tokens:
        drawn = math.exp(SPREAD * float(torch.randn((), generator=generator)))
        ends.append(min(tokens, ends[-1] + max(1, round(MEDIAN * drawn))))
    return ends


def count_step(
    config: ModelConfig, tokens: int, boundaries: Sequence[int], guard: Guard | None = None
) -> Counts:
    """Count the second step of a run whose rows hold documents with these boundaries: its launches,
    and the waits until the next record of a step."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:fake", store=HashStore(), rank=0, world_size=1)
    plan = SyntheticPlan(
        config=SyntheticConfig(steps=2, seq_len=tokens, batch_rows=1, warmup=0),
        vocab_size=config.vocab_size,
        seed=0,
    )
    options = LoopOptions(micro_batch_tokens=tokens, seed=0, guard=guard or Guard())

    def steps(start: int, rows: int) -> Iterator[list[SyntheticBatch]]:
        loader = SyntheticLoader(plan, rank=0, world=1, micro_batch=rows, start_step=start)
        packed = torch.tensor(boundaries, dtype=torch.int32)
        return ([replace(batch, cu_seqlens=packed) for batch in step] for step in loader)

    with fake_gpu() as gpu:
        parallel = join(LayoutConfig(), "cuda", timedelta(minutes=1))
        model = build_meta(config)
        engine = Fsdp2Config().build(Objective(model), AdamWConfig(), PRECISIONS["bf16"], parallel)
        gpu.trains = True
        counter = _Counter(gpu)
        start = RunState(
            step=0, row=0, tokens=0, plan_hash=plan.hash, updates=0, ledger="0" * 32, seed=0
        )
        loop = Loop(
            *(plan, steps, lambda _: 1e-3, engine, parallel, options),
            recorder=counter,
            begin=counter.begin,
        )
        with saved_tensors_hooks(counter.saved.keep, lambda tensor: tensor):
            loop.run(start)
        assert counter.counts is not None
        return counter.counts


class _Saved:
    """Bytes of the tensors that a forward pass keeps, each storage once."""

    def __init__(self) -> None:
        self.storages: dict[Any, int] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if not (owner.is_leaf and owner.requires_grad):  # a weight
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = storage.nbytes()
        return tensor


class _Counter:
    """Keeps the counts from the beginning of step 1 to the next record of a step."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.saved = _Saved()
        self.counts: Counts | None = None
        self.counting = False

    def begin(self, step: int) -> None:
        self.gpu.clear()
        self.saved.storages.clear()
        self.counting = step == 1

    def record(self, record: StepRecord) -> None:
        if self.counting:
            kept = sum(self.saved.storages.values())
            self.counts = Counts(list(self.gpu.launches), list(self.gpu.waits), kept)
            self.counting = False

    def evaluated(self, step: Any, evaluation: Any) -> None: ...

    def sync(self) -> None: ...


def report(name: str, counts: Counts, top: int) -> None:
    gigabytes = {
        kind: counts.bytes(kind) / 1e9 for kind in ("GEMM", "attention", "kernel", "glue", "engine")
    }
    moved = ", ".join(f"{kind} {size:.1f}" for kind, size in gigabytes.items())
    print(
        f"{name}: {len(counts.launches):,} launches; GEMM {counts.gemm_flops / 1e12:.1f} TFLOP = "
        f"{1e3 * counts.gemm_time:.1f} ms; GB: {moved}; glue {1e3 * counts.glue_time:.1f} ms = "
        f"{counts.glue_time / counts.gemm_time:.1%} of GEMM; {len(counts.waits)} waits; "
        f"{counts.saved / 2**30:.1f} GiB saved"
    )
    for wait, times in Counter(counts.waits).items():
        print(f"    wait {times} × {wait.name} at {wait.place}")
    places: dict[tuple[str, str], list[Launch]] = defaultdict(list)
    for each in counts.launches:
        if kind_of(each) == "glue":
            places[each.name, each.place].append(each)
    sizes = {place: sum(each.bytes for each in group) for place, group in places.items()}
    for (operation, place), size in sorted(sizes.items(), key=lambda item: -item[1])[:top]:
        group = places[operation, place]
        print(f"    glue {1e3 * size / BYTES:.2f} ms: {len(group)} × {operation}, {place}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--top", type=int, default=6, help="operations of glue to list")
    given = parser.parse_args()
    ends = documents(TOKENS)
    print(
        f"H200: {FLOPS / 1e12:.0f} TFLOP/s, {BYTES / 1e12:.1f} TB/s assumed; counted, not measured"
    )
    for name in given.models:
        config = load_model_config(name)
        whole = count_step(config, TOKENS, [0, TOKENS])
        report(f"{name}, one document", whole, given.top)
        packed = count_step(config, TOKENS, ends)
        report(f"{name}, {len(ends) - 1} documents", packed, given.top)
        print(
            f"{name}: packed rows move {packed.pass_bytes / whole.pass_bytes:.3f}x the bytes of "
            f"unpacked rows, with {len(packed.launches) / len(whole.launches):.2f}x the launches"
        )


if __name__ == "__main__":
    main()
