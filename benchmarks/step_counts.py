"""Counts of a training step on a GPU, without a GPU: launches, FLOPs, bytes, waits, saved bytes.

python -m benchmarks.step_counts [MODEL …] [--top 6]

A step is the real one: the loop, FSDP2 on one rank, bf16 with fp32 masters, clipping, AdamW, one
micro-batch of one row of 16,384 tokens, on the fake device of _fake_gpu.py. Packed rows hold
documents of log-normal lengths (median 700). _launch_kinds.py defines the classes and the rates.
Bytes are lower bounds: each argument of a launch counts once. Nothing here is a measurement.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import HashStore

from headrace.models.accounting.count import build_meta
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.config.options.recompute import Recompute
from headrace.models.transforms.fp8 import quantize
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import create_groups
from headrace.trainer.loop.guard import Guard
from headrace.trainer.loop.hooks.hook import Hook, StepRecord

from ._fake_gpu import FakeGpu, Launch, Wait, fake_gpu
from ._launch_kinds import BYTES, FLOPS, kind_of
from ._synthetic_run import documents, train

MODELS = (
    *("transformer-1b", "hybrid-1b", "mamba2-1.3b", "evo2-7b-8k", "zamba2-1.2b"),
    "blackmamba-1.5b",
)
TOKENS = 16_384


@dataclass(frozen=True)
class Counts:
    """Counts of one step."""

    launches: list[Launch]
    waits: list[Wait]
    saved: int
    """Bytes that the forward pass keeps for the backward pass, weights left out."""

    def bytes(self, *kinds: str) -> int:
        return sum(launch.bytes for launch in self.launches if kind_of(launch) in kinds)

    @property
    def gemm_flops(self) -> int:
        return sum(launch.flops for launch in self.launches if kind_of(launch) == "GEMM")

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


def count_step(
    config: ModelConfig,
    tokens: int,
    boundaries: Sequence[int],
    guard: Guard | None = None,
    *,
    recompute: Recompute = "none",
) -> Counts:
    """Count the second step of a run whose rows hold documents with these boundaries: its launches,
    and the waits until the next record of a step."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:fake", store=HashStore(), rank=0, world_size=1)
    with fake_gpu() as gpu:
        parallel = create_groups(LayoutConfig(), "cuda", timedelta(minutes=1))
        number_formats = PRECISIONS["bf16"]
        model = quantize(build_meta(config), number_formats.fp8)
        model.set_recompute(recompute)
        engine = Fsdp2Config().build(Objective(model), AdamWConfig(), number_formats, parallel)
        gpu.trains = True
        counter = _Counter(gpu)
        with saved_tensors_hooks(counter.tensors.keep, lambda tensor: tensor):
            train(
                engine,
                parallel,
                config.vocab_size,
                [counter],
                steps=2,
                tokens=tokens,
                boundaries=lambda row: boundaries,
                guard=guard,
            )
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


class _Counter(Hook):
    """Keeps the counts from the beginning of step 1 to the next record of a step."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.tensors = _Saved()
        self.counts: Counts | None = None
        self.counting = False

    def step_begins(self, step: int) -> None:
        self.gpu.clear()
        self.tensors.storages.clear()
        self.counting = step == 1

    def step_done(self, record: StepRecord) -> None:
        if self.counting:
            kept = sum(self.tensors.storages.values())
            self.counts = Counts(list(self.gpu.launches), list(self.gpu.waits), kept)
            self.counting = False


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
    for launch in counts.launches:
        if kind_of(launch) == "glue":
            places[launch.name, launch.place].append(launch)
    sizes = {place: sum(launch.bytes for launch in group) for place, group in places.items()}
    for (operation, place), size in sorted(sizes.items(), key=lambda item: -item[1])[:top]:
        group = places[operation, place]
        print(f"    glue {1e3 * size / BYTES:.2f} ms: {len(group)} × {operation}, {place}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--top", type=int, default=6, help="operations of glue to list")
    options = parser.parse_args()
    ends = documents(TOKENS)
    print(
        f"H200: {FLOPS / 1e12:.0f} TFLOP/s, {BYTES / 1e12:.1f} TB/s assumed; counted, not measured"
    )
    for name in options.models:
        config = load_model_config(name)
        whole = count_step(config, TOKENS, [0, TOKENS])
        report(f"{name}, one document", whole, options.top)
        packed = count_step(config, TOKENS, ends)
        report(f"{name}, {len(ends) - 1} documents", packed, options.top)
        print(
            f"{name}: packed rows move {packed.pass_bytes / whole.pass_bytes:.3f}x the bytes of "
            f"unpacked rows, with {len(packed.launches) / len(whole.launches):.2f}x the launches"
        )


if __name__ == "__main__":
    main()
