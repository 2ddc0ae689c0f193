"""Bytes that a rank sends under context parallelism, forward and backward, counted.

    python -m benchmarks.context_parallel [--length 4096]

The operators run for each rank in turn; a stand-in for the network adds up the sizes of the
messages. They are proportional to rows and width, and, except for states and halos, to length.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.model.model import Model
from headrace.models.parallel.axes import Axes, Axis

WIDTH = 128
CASES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "attention, 8 kv_heads of 8: ring against a2a": (
        "{kind: attention, heads: 8}", {"attention": "ring"}, {"attention": "a2a"}
    ),
    "attention, 1 kv_head of 8: ring against a2a": (
        "{kind: attention, heads: 8, kv_heads: 1}", {"attention": "ring"}, {"attention": "a2a"}
    ),
    "Hyena-LI: states against a2a": (
        "{kind: hyena-li}", {"hyena_li": "states"}, {"hyena_li": "a2a"}
    ),
}  # fmt: skip


def config_of(operator: str) -> ModelConfig:
    overrides = [f"operators.x={operator}", "pattern='[x]'", f"width={WIDTH}", "mlp=null"]
    return load_model_config("tiny-hybrid", overrides)


def most_sent(config: ModelConfig, forms: dict[str, str], length: int, size: int) -> int:
    """Return the bytes of the rank that sends most."""
    return max(sent_by(config, forms, length, Axis(None, rank, size)) for rank in range(size))


def sent_by(config: ModelConfig, forms: dict[str, str], length: int, axis: Axis) -> int:
    model = Model(config)
    model.init_weights(0)
    model.axes = Axes(context=axis, **forms)  # type: ignore[arg-type]
    sent = 0

    def count(received: Tensor, x: Tensor, due: list[int], to: list[int], **_: Any) -> Any:
        nonlocal sent
        sent += (sum(to) - to[axis.rank]) * x.element_size()
        received.zero_()
        return mock.Mock()

    with mock.patch.object(dist, "all_to_all_single", count):
        tokens = torch.zeros(1, length // axis.size, dtype=torch.int64)
        model.hidden(tokens)[0].sum().backward()
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096)
    length = parser.parse_args().length
    for name, (operator, forms, peer_forms) in CASES.items():
        config = config_of(operator)
        for size in (2, 4, 8):
            ours, theirs = (most_sent(config, form, length, size) for form in (forms, peer_forms))
            print(
                f"context parallel, {name}, cp {size}: {ours / theirs:.2f}x the bytes"
                f" ({ours / 1e6:.2f} MB and {theirs / 1e6:.2f} MB sent by a rank, a row of {length}"
                f" tokens, width {WIDTH}, fp32, forward and backward)"
            )


if __name__ == "__main__":
    main()
