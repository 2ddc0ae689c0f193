"""Predictions of the lines of gpu_step.py, from counts of a step on a GPU that does not exist.

A step takes the larger of two times: that of its launches on the host, and on the device the sum of
GEMM FLOPs, attention FLOPs, and bytes of kernels, glue and engine over their rates. Memory is the
state by the engine's own list, and what the forward pass saves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from benchmarks._launch_kinds import BYTES, FLOPS, kind_of
from benchmarks.step_counts import Counts, count_step
from headrace.models.accounting.count import build_meta
from headrace.models.accounting.memory import rank_shards
from headrace.models.accounting.state import Degrees, state_bytes
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.config.options.recompute import expand_rules
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.record.speed import BF16_PEAK, count_speed

from ._gpu_lines import Line, Sizes

PEAK = BF16_PEAK["H200"]
FP8_FLOPS = 2 * FLOPS
ATTENTION_FLOPS = 400e12
"""FLOP/s of attention, forward and backward together."""
ATTENTION_PASSES = 3.5
"""FLOPs of forward and backward attention, in forward passes: flash recomputes the scores."""
KERNEL_BYTES = 0.7 * BYTES
"""Bytes/s of headrace's kernels."""
LAUNCH = 6e-6
"""Seconds that the host takes for a launch."""


def predict(line: Line, sizes: Sizes) -> str:
    """Return the text of a prediction. It counts at full size, in a dry run a tiny model."""
    config = sizes.model(line.model)
    counts = count_step(
        config,
        sizes.tokens,
        sizes.boundaries(line.packed, 0),
        precision=line.precision,
        recompute=line.recompute,
    )
    pairs = sizes.pairs(line.packed)
    rules = expand_rules(line.recompute, len(config.layers))
    fp8 = PRECISIONS[line.precision].fp8
    speed = count_speed(config, [pairs], rules=rules, peak=PEAK, fp8=fp8)
    parts = device_times(counts, attention_flops(line, sizes))
    host = LAUNCH * len(counts.launches)
    seconds = max(sum(parts.values()), host)
    rate = sizes.tokens / seconds
    mfu, hfu = speed.mfu(pairs, rate), speed.hfu(pairs, rate)
    state = sum(state_of(line, sizes))
    shares = ", ".join(f"{kind} {time / sum(parts.values()):.1%}" for kind, time in parts.items())
    return (
        f"{rate:,.0f} tokens/s, MFU {mfu:.3f}, HFU {hfu:.3f}, {1e3 * seconds:.1f} ms a step "
        f"(host {1e3 * host:.1f}), memory {(state + counts.saved) / 2**30:.1f} GiB (state "
        f"{state / 2**30:.1f}), {len(counts.launches):,} launches a step, {shares}"
    )


def device_times(counts: Counts, attention: float) -> dict[str, float]:
    """Return the seconds of each class of launch; `attention` are its FLOPs."""
    times: defaultdict[str, float] = defaultdict(float)
    for launch in counts.launches:
        kind = kind_of(launch)
        if kind == "GEMM":
            times[kind] += launch.flops / (FP8_FLOPS if "_scaled_mm" in launch.name else FLOPS)
        elif kind != "attention":
            times[kind] += launch.bytes / (KERNEL_BYTES if kind == "kernel" else BYTES)
    times["attention"] = attention / ATTENTION_FLOPS
    return {kind: times[kind] for kind in ("GEMM", "attention", "kernel", "glue", "engine")}


def attention_flops(line: Line, sizes: Sizes) -> float:
    """Count the FLOPs of attention in a step, over the pairs of tokens that it computes."""
    model = build_meta(sizes.model(line.model))
    operators = [branch.operator for block in model.typed_blocks() for branch in block.branches()]
    pairs = sizes.pairs(line.packed)
    forward = sum(
        operator.flops(pairs).get("attention", 0.0)  # type: ignore[arg-type]
        for operator in operators
    )
    passes = ATTENTION_PASSES + (line.recompute != "none")
    return sizes.tokens * passes * forward


def state_of(line: Line, sizes: Sizes) -> Sequence[int]:
    """Return the bytes of the parts of the state on one rank."""
    config, degrees = sizes.model(line.model), Degrees(dp=1, tp=1, cp=1, ep=1)
    states = AdamWConfig().states(build_meta(config))
    parts = Fsdp2Config().state_layout(
        PRECISIONS[line.precision], lambda name: 4 * len(states[name]), "cuda", LayoutConfig()
    )
    return list(state_bytes(parts, rank_shards(config, degrees, 0), degrees).values())
