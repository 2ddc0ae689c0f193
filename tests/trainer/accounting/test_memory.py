"""The counted memory of a step, beside the events of torch's allocator on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks import _memory
from headrace.trainer.layout.groups import Parallel

SMALL = ("synthetic.seq_len=256", "synthetic.batch_rows=4", "micro_batch_tokens=512", "threads=1")
BUCKETS = ("engine.reduce_bucket_size=1000000", "engine.allgather_bucket_size=1000000")
"""As large as the gradients; the ranks' other tests have small ones."""
OFFLOAD = ("engine.offload_optimizer=cpu",)
DEEPSPEED = "engine.extra={steps_per_print: 1000000}"
"""A rank that holds the whole state alone keeps DeepSpeed's engine with options of its own."""
RULES = ("none", "operator", "block", "{save: [matmul]}", "0.5")
MODEL, HYBRID = "tiny-transformer", "tiny-hybrid"


def counted(words: Sequence[str], model: str = MODEL) -> dict[str, int]:
    """Return the bytes by part on the fullest rank."""
    return max(_memory.counted(model, [*SMALL, *words]), key=lambda parts: sum(parts.values()))


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def is_near(counted: int, real: int) -> bool:
    return 0.99 <= counted / real <= 1.03


@pytest.mark.slow
def test_recompute_choices_have_their_true_memory_and_order(parallel: Parallel) -> None:
    """FSDP2 on one rank, two micro-batches. Without the working set no count is near."""
    words = ["engine.kind=fsdp2", "processes=1"]
    peaks = _memory.measured_rules(MODEL, [*SMALL, *words], RULES)
    result, real = {}, {rule: peak for rule, [peak] in zip(RULES, peaks, strict=True)}
    for rule in RULES:
        parts = counted([*words, f"recompute={rule}"])
        result[rule] = sum(parts.values())
        assert is_near(result[rule], real[rule]), (rule, result[rule] / real[rule])
        working = parts.get("working set", 0) + parts.get("logits", 0)
        assert not is_near(result[rule] - working, real[rule])
    assert sorted(RULES, key=result.__getitem__) == sorted(RULES, key=real.__getitem__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (MODEL, ["engine.kind=fsdp2", "layout.tp=2"]),
        (
            MODEL,
            [
                *("engine.kind=fsdp2", "layout.pp=2", "synthetic.batch_rows=8"),
                *("recompute=block", "precision=bf16"),
            ],
        ),
        (MODEL, ["engine.kind=fsdp2", "engine.shard=1", "engine.gather=block", "recompute=block"]),
        (
            MODEL,
            [
                *("engine.zero=2", "layout.cp=2", "layout.attention=ring", "recompute=block"),
                *("synthetic.seq_len=1024", "micro_batch_tokens=512", *BUCKETS),
            ],
        ),
        long(MODEL, ["engine.zero=1", "recompute=block", "precision=bf16", *BUCKETS]),
        long(MODEL, ["engine.zero=3", "recompute=block", "precision=bf16", *BUCKETS]),
        long(
            HYBRID,
            ["engine.zero=3", "layout.tp=2", "recompute={save: [matmul]}", *BUCKETS, DEEPSPEED],
        ),
        (
            HYBRID,
            [
                *("engine.zero=3", "layout.tp=2", "recompute=block", "precision=bf16"),
                *(*BUCKETS, DEEPSPEED),
            ],
        ),
        long(MODEL, ["engine.zero=1", "recompute=block", "precision=bf16", *OFFLOAD, *BUCKETS]),
        (
            MODEL,
            ["engine.zero=2", "recompute=block", "synthetic.batch_rows=8", *OFFLOAD, *BUCKETS],
        ),
        ("tiny-moe", ["engine.kind=fsdp2", "layout.ep=2", "recompute=block"]),
    ],
    ids=[
        *("tp", "pp", "hsdp", "ring", "zero1", "zero3", "zero3-matmul", "zero3-bf16"),
        *("zero1-offload", "zero2-offload", "ep"),
    ],
)
def test_two_ranks_have_the_counted_memory(
    ranks: Callable[[int], Any], model: str, words: list[str]
) -> None:
    words = [*words, "processes=2"]
    result = sum(counted(words, model).values())
    real = max(ranks(2).run("measured_memory", model, [*SMALL, *words])[0])
    assert is_near(result, real), result / real
