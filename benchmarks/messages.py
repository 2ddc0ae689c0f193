"""Messages of a step in several layouts on 4 ranks, beside the least bytes that it needs.

    python -m benchmarks.messages [--only fsdp2]

The ranks count the collectives of their second step: buffers and groups exist. Bytes are those that
a rank sends by ring algorithms (_collectives.py), the mean of the ranks, in fp32. The least is
computed from the parameters and the rows, for each rank:

    state    gradients reduced once and updated weights gathered once, over dp × cp or the replicas
             of experts; gradients of copies (tied, shared, replicated under tp) summed once
    pp       the stream and its gradients, once for each cut and micro-batch
    tp       each operator's input gathered and its output scattered, forward and backward; the
             same for the two ends of the model
    cp       a2a attention: queries, keys, values and outputs change ranks, forward and backward
    ep       tokens to their experts and back, forward and backward, if routing is even
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch

from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.model.model import Model
from headrace.trainer.engines.config import EngineConfig
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.fsdp.settings import Gather
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.groups import local_shards
from headrace.trainer.engines.update import update
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.loop.execute import execute

from . import _ranks
from ._collectives import Count

RANKS, ROWS, LENGTH = 4, 16, 64
FP32 = 4


@dataclass(frozen=True)
class Case:
    engine: EngineConfig
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    model: str = "tiny-hybrid"

    def __str__(self) -> str:
        degrees = {name: getattr(self.layout, name) for name in ("pp", "cp", "tp", "ep")}
        degrees = {"pp": degrees.pop("pp"), "dp": self.layout.data_parallel(RANKS), **degrees}
        axes = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        chunks = f", {self.layout.chunks} chunks" if self.layout.chunks > 1 else ""
        gather = ""
        if isinstance(self.engine, Fsdp2Config):
            gather = f", gather {self.engine.gather_mode(self.layout)}"
        return f"{self.engine.describe()}{gather}, {axes}{chunks}, {self.model}"


ZERO: tuple[Literal[0, 1, 2], ...] = (0, 1, 2)
GATHER: tuple[Gather, ...] = get_args(Gather)
CASES = [
    *(Case(DeepSpeedConfig(zero=zero)) for zero in ZERO),
    *(Case(Fsdp2Config(gather=gather)) for gather in GATHER),
    Case(Fsdp2Config(shard=2, gather="step")),
    *(Case(DeepSpeedConfig(zero=zero), LayoutConfig(pp=2)) for zero in ZERO),
    Case(Fsdp2Config(gather="block"), LayoutConfig(pp=2)),
    Case(Fsdp2Config(gather="step"), LayoutConfig(pp=2)),
    Case(Fsdp2Config(), LayoutConfig(pp=4)),
    Case(Fsdp2Config(), LayoutConfig(pp=2, schedule="interleaved", chunks=2)),
    Case(Fsdp2Config(), LayoutConfig(pp=2), "tiny-zamba"),
    Case(Fsdp2Config(gather="step"), LayoutConfig(tp=2), "tiny-transformer"),
    Case(Fsdp2Config(gather="step"), LayoutConfig(cp=2), "tiny-transformer"),
    Case(Fsdp2Config(), LayoutConfig(pp=2, tp=2), "tiny-transformer"),
    Case(Fsdp2Config(gather="step"), LayoutConfig(ep=4), "tiny-moe"),
    Case(DeepSpeedConfig(zero=1), LayoutConfig(ep=2), "tiny-moe"),
    Case(Fsdp2Config(), LayoutConfig(pp=2, ep=2), "tiny-moe"),
    Case(DeepSpeedConfig(zero=3)),  # the last: it patches torch for every engine after it
]


class Batch(NamedTuple):
    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    cu_seqlens: torch.Tensor


def batches(
    number: int, vocabulary: int, part: slice, seed: int, length: int = LENGTH
) -> list[Batch]:
    """Return micro-batches of one row of one document."""
    numbers = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (number, 1, length), generator=numbers)[..., part]
    ends = torch.tensor([0, length])
    return [Batch(token, token, torch.ones(token.shape), ends) for token in tokens]


def work(cases: list[Case]) -> list[tuple[Counter[str], Counter[str], float]]:
    return [count(case) for case in cases]


def count(case: Case) -> tuple[Counter[str], Counter[str], float]:
    """Return calls and bytes of the second step, and the least bytes, summed over the ranks."""
    config = load_model_config(case.model)
    engine, parallel = _ranks.build(config, case.engine, case.layout, LENGTH, "fp32")
    part = parallel.axes.context.part(LENGTH)
    rows = batches(ROWS // parallel.dp, config.vocab_size, part, parallel.dp_rank)
    orders = parallel.pipe.orders(len(rows))
    for _ in range(2):
        with Count() as counted:
            execute(orders, rows, engine, parallel, float(ROWS * LENGTH))
            update(engine, 1e-3)
    needed = sum(
        count_required_bytes(engine.objective.model, config, case.layout, parallel).values()
    )
    totals: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(totals, (counted.calls, counted.bytes, needed))
    calls, sizes, required_bytes = zip(*totals, strict=True)
    return sum(calls, Counter()), sum(sizes, Counter()), sum(required_bytes)


def count_required_bytes(
    model: Model, config: ModelConfig, layout: LayoutConfig, parallel: Parallel
) -> dict[str, float]:
    """Return the least bytes that this rank sends in a step, by axis."""
    result = dict.fromkeys(("state", "copies", "pp", "tp", "cp", "ep"), 0.0)
    for shard in local_shards(model).values():
        ranks = (parallel.replicas if shard.experts else parallel.data).size
        size = FP32 * torch.Size(shard.local).numel()
        result["state"] += 2 * size * (ranks - 1) / ranks
        copies = shard.copies.size
        result["copies"] += 2 * size / ranks * (copies - 1) / copies
    tokens = ROWS // parallel.dp * LENGTH // (layout.cp * layout.tp)
    stream = FP32 * tokens * config.width
    chunks = range(parallel.pipe.stage, layout.all_chunks, layout.pp)
    for chunk in chunks:
        sends = [chunk + 1] * (chunk < parallel.pipe.last_chunk) + [chunk] * (chunk > 0)
        result["pp"] += stream * sum(model.stream_tensors(send) for send in sends)
    operators = [branch.operator for block in model.typed_blocks() for branch in block.branches()]
    ends = (0 in chunks) + (parallel.pipe.last_chunk in chunks)
    result["tp"] = 2 * (2 * len(operators) + ends) * (layout.tp - 1) * stream
    for options in (config.operators[name] for name in _called(config, model)):
        if options.attention_heads and layout.cp > 1:
            heads = options.heads + options.kv_heads
            sent = 2 * heads * (config.width // options.heads) * tokens * FP32
            result["cp"] += 2 * sent * (layout.cp - 1) / layout.cp
        if options.expert_count:
            result["ep"] += 4 * options.top_k * stream * (layout.ep - 1) / layout.ep
    return result


def _called(config: ModelConfig, model: Model) -> list[str]:
    """Return the names of the operators that this rank calls, one for each call."""
    layers = [block.layer for block in model.typed_blocks()]
    return [name for layer in layers for name in (layer.mixer, layer.mlp) if name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    only = parser.parse_args().only.lower()
    cases = [case for case in CASES if only in str(case).lower()]
    result = _ranks.run(RANKS, work, cases)
    for case, (calls, sizes, needed) in zip(cases, result, strict=True):
        kinds = ", ".join(
            f"{calls[kind] / RANKS:g} {kind} {sizes[kind] / RANKS / 1e6:.3g} MB"
            for kind in sorted(calls)
        )
        total = sum(sizes.values())
        print(
            f"messages, {case}: {total / needed:.2f}x the least bytes, {total / RANKS / 1e6:.2f} "
            f"and {needed / RANKS / 1e6:.2f} MB sent by a rank: {kinds}"
        )


if __name__ == "__main__":
    main()
