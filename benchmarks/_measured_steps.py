"""Steps that one H100 took, beside predictions by the shipped file, which none of them fitted.

The program was that of commit 51f6e327 (benchmarks/results/long.gpu_suite-h100.txt), on rows of
16,384 tokens. What it did is counted: the kind of attention as that was measured alone, the bytes
of its engine, and the memory of its loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.models.accounting.state import device_bytes
from headrace.models.config.config import load_model_config
from headrace.models.kernels.linear_cross_entropy import workspace_bytes
from headrace.planner.hardware import Hardware
from headrace.planner.prices.layers import Costs
from headrace.planner.prices.machine import Machine
from headrace.planner.prices.program import TrainingProgram
from headrace.planner.search.given_layout import price_run
from headrace.planner.search.make import uniform_phase
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.run.config import RunConfig

LENGTH = 16_384
FLOPS = 2.0 * LENGTH**2 * 16 * 128
"""Operations of causal attention with 16 heads of 128 channels, forward."""
ATTENTION = {"flash": (3.37, 8.59), "cudnn": (1.70, 4.78), "packed": (0.46, 1.51)}
"""Milliseconds of attention alone, forward and backward. Packed rows have short documents."""
ENGINE_BYTES = 56
"""Bytes for a parameter and step beside FSDP2's copies, which the planner prices: AdamW 28; the
norm 20, by copies in fp64; clipping 8."""
LOSS_CHUNKS = 4
"""Chunks of logits in that program's loss. It held a chunk in bf16, the weight's gradient summed in
fp32 and rounded to bf16, and the gradient of its input: 564 MiB for hybrid-1b, 850 for mamba2-1.3b
(benchmarks/results/loss_memory.txt)."""
GIB = 1 << 30


@dataclass(frozen=True)
class Step:
    model: str
    attention: str
    milliseconds: float
    gib: float


STEPS = (
    Step("hybrid-1b", "packed", 272.5, 38.1),
    Step("hybrid-1b", "flash", 283.3, 38.1),
    Step("transformer-1b", "packed", 294.4, 34.9),
    Step("transformer-1b", "flash", 485.5, 34.9),
    Step("transformer-1b", "cudnn", 376.0, 34.9),
    Step("mamba2-1.3b", "packed", 476.6, 56.3),
    Step("mamba2-1.3b", "", 425.3, 56.3),
)


def predict(step: Step) -> tuple[float, float]:
    """Return the errors of seconds and of bytes."""
    hardware = Hardware.load("h100")
    file = hardware.file
    if step.attention in ATTENTION:
        milliseconds = dict(zip(("forward", "backward"), ATTENTION[step.attention], strict=True))
        work = {"forward": FLOPS, "backward": 2.5 * FLOPS}
        rows = tuple(
            replace(row, rate=1e3 * work[row.direction] / milliseconds[row.direction])
            for row in file.attention
        )
        file = replace(file, attention=rows)
    machine = Machine(
        Hardware(file, hardware.where), "bf16", program=TrainingProgram(update_bytes=ENGINE_BYTES)
    )
    engine = Fsdp2Config(gather="block")  # as FSDP2 was on one rank, without its own way
    run = RunConfig(precision="bf16", device="cuda", micro_batch_tokens=LENGTH, engine=engine)
    model = load_model_config(step.model)
    costs = Costs(model, run, machine, uniform_phase(LENGTH, 1))
    candidate = price_run(costs, run, 1, hardware.usable_memory)
    [timeline] = candidate.timelines
    vocabulary, width = model.vocab_size, model.width
    logits = LENGTH // LOSS_CHUNKS * vocabulary
    loss_bytes = 2 * (logits + LENGTH * width + vocabulary * width) + 4 * vocabulary * width
    loss_bytes -= workspace_bytes(LENGTH, width, vocabulary, torch.bfloat16)
    memory = max(
        device_bytes(moment.high) + loss_bytes * (moment.name == "forward loss")
        for moment in timeline.moments
    )
    seconds = candidate.solution.price
    return seconds / (step.milliseconds / 1e3) - 1, memory / GIB / step.gib - 1
