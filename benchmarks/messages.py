"""Messages of a step in several layouts on 4 ranks: number and bytes by kind, counted.

    python -m benchmarks.messages [--model tiny-hybrid]

The ranks train on a second step, so buffers and groups exist. Every collective call of
torch.distributed passes the dispatcher, where a mode counts it: the bytes of an all-reduce are its
tensor, of a gather its result, of a reduce-scatter its input, of a send its message. The least is
computed from the parameters and the rows: gradients reduced once, in fp32; updated weights gathered
once; activations and their gradients sent once for each cut and micro-batch. Layouts with tensor or
context parallelism have no such number here: docs/models.md lists what their operators send.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.models.accounting.count import build_meta, parameters
from headrace.models.config import load_model_config
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.engine import EngineConfig
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.update import update
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.loop.execute import execute

from . import _ranks

RANKS, ROWS, LENGTH = 4, 8, 64
KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "gather",
    "allgather_": "gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all-to-all",
    "send": "send",
}
"""Names of the operations of c10d; a receive is the other end of a send."""
CASES: list[tuple[EngineConfig, LayoutConfig]] = [
    (DeepSpeedConfig(zero=1), LayoutConfig()),
    (DeepSpeedConfig(zero=2), LayoutConfig()),
    (DeepSpeedConfig(zero=3), LayoutConfig()),
    (Fsdp2Config(gather="block"), LayoutConfig()),
    (Fsdp2Config(gather="micro-batch"), LayoutConfig()),
    (Fsdp2Config(gather="step"), LayoutConfig()),
    (DeepSpeedConfig(zero=1), LayoutConfig(pp=2)),
    (DeepSpeedConfig(zero=2), LayoutConfig(pp=2)),
    (Fsdp2Config(gather="block"), LayoutConfig(pp=2)),
    (Fsdp2Config(), LayoutConfig(pp=2)),
    (Fsdp2Config(), LayoutConfig(pp=4)),
    (Fsdp2Config(), LayoutConfig(pp=2, schedule="interleaved", chunks=2)),
    (Fsdp2Config(), LayoutConfig(pp=2, tp=2)),
    (Fsdp2Config(), LayoutConfig(tp=2)),
    (Fsdp2Config(), LayoutConfig(cp=2)),
]


class Batch(NamedTuple):
    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    cu_seqlens: torch.Tensor


class Count(TorchDispatchMode):
    """Counts messages and their bytes by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace == "c10d" and name in KINDS:
            kind = KINDS[name]
            self.messages[kind] += 1
            self.bytes[kind] += max(_size(each) for each in args)
        return func(*args, **(kwargs or {}))


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


def batches(number: int, part: slice) -> list[Batch]:
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)[:, part]
    cu_seqlens = torch.tensor([0, LENGTH])
    return [Batch(tokens, tokens, torch.ones(tokens.shape), cu_seqlens) for _ in range(number)]


def work(model: str, engine: EngineConfig, layout: LayoutConfig) -> Any:
    """Return messages and bytes of the second step, over all ranks."""
    config = load_model_config(model)
    built, parallel = _ranks.build(config, engine, layout, LENGTH, "fp32")
    rows = batches(ROWS // parallel.dp, parallel.axes.context.part(LENGTH))
    orders = parallel.pipe.orders(len(rows))
    for _ in range(2):
        with Count() as count:
            execute(orders, rows, built, parallel, float(ROWS * LENGTH))
            update(built, 1e-3)
    totals: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(totals, (count.messages, count.bytes))
    return sum((n for n, _ in totals), Counter()), sum((n for _, n in totals), Counter())


def least(model: str, layout: LayoutConfig) -> int | None:
    """Return the least bytes of a step over all ranks, for layouts of pp and dp alone."""
    if layout.tp * layout.cp > 1:
        return None
    config = load_model_config(model)
    dp = layout.data_parallel(RANKS)
    size = 4 * parameters(build_meta(config))
    reduced = 2 * size * dp if dp > 1 else 0  # gradients reduced, weights gathered, on each rank
    cuts = layout.all_chunks - 1
    return reduced + 2 * cuts * ROWS * LENGTH * config.width * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-hybrid")
    model = parser.parse_args().model
    for engine, layout in CASES:
        messages, sizes = _ranks.run(RANKS, work, model, engine, layout)
        kinds = ", ".join(
            f"{messages[kind]} {kind} {sizes[kind] / 1e6:.2f} MB" for kind in sorted(messages)
        )
        axes = [("pp", layout.pp), ("dp", layout.data_parallel(RANKS)), ("cp", layout.cp)]
        degrees = " × ".join(f"{name} {n}" for name, n in [*axes, ("tp", layout.tp)] if n > 1)
        chunked = f", {layout.chunks} chunks" if layout.chunks > 1 else ""
        gather = f", gather {engine.gather_of(layout)}" if isinstance(engine, Fsdp2Config) else ""
        lower = least(model, layout)
        ratio = f"{sum(sizes.values()) / lower:.2f}x the least bytes; " if lower else ""
        print(f"messages, {engine.describe()}{gather}, {degrees}{chunked}: {ratio}{kinds}")


if __name__ == "__main__":
    main()
