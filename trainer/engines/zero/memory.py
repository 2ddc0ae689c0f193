"""Count the memory of DeepSpeed's state by ZeRO stage, for the memory accounting.

    stage   weights   gradients       masters         optimizer   buffers
    0       all       all             the weights     all         none
    1       all       all             sharded         sharded     one bucket in fp32, none in bf16
    2       all       sharded         sharded         sharded     one bucket, as the weights
    3       sharded   sharded         sharded         sharded     one bucket in fp32

Gradients are counted at their peak: in ZeRO-1 they are unsharded until the last micro-batch is
reduced, and bf16 adds the last micro-batch's gradients to the fp32 sums. `overlap_comm` takes a
second bucket in ZeRO-1 and 2. Tensors that live for a part of a step are in step_memory.py.

With `offload_optimizer`, masters, optimizer states and a copy of the sharded gradients are in host
memory, with staging copies: weights in ZeRO-1 and 2, gradients in ZeRO-3 and in fp32 in ZeRO-2 (if
a step has several micro-batches; they are always counted). The device has a buffer for its largest
gradient, and in bf16 the sharded sums of ZeRO-2 or a bucket of ZeRO-1 in fp32.
"""

from __future__ import annotations

import math
from functools import partial

from ....models.accounting.state import (
    HOST,
    BytesPerParameter,
    Shapes,
    StatePart,
    cut_flat,
    cut_parameters,
    elements,
)
from ....models.config.options.precision import Precision
from .settings import ZeroConfig


def state_layout(
    config: ZeroConfig,
    precision: Precision,
    optimizer_bytes: BytesPerParameter,
    device: str,
    largest_bucket: int,
) -> list[StatePart]:
    """Return the parts of the state. `largest_bucket` is the device's default."""
    stage, compute, half = config.zero, precision.weight_bytes, precision.separate_masters
    replicated = StatePart
    sharded = partial(
        StatePart, sharded_over=("dp", "cp"), cut=cut_parameters if stage == 3 else cut_flat
    )
    if stage == 0:
        return [
            replicated(name="weights", bytes_per_parameter=compute),
            replicated(name="gradients", bytes_per_parameter=compute),
            replicated(name="optimizer", bytes_per_parameter=optimizer_bytes),
        ]
    host = HOST if config.offloads else ""
    parts = [
        (sharded if stage == 3 else replicated)(name="weights", bytes_per_parameter=compute),
        sharded(name=f"{host}masters", bytes_per_parameter=4),
        sharded(name=f"{host}optimizer", bytes_per_parameter=optimizer_bytes),
    ]
    if stage == 1:
        parts.append(replicated(name="gradients", bytes_per_parameter=4))
    else:
        parts.append(sharded(name=f"{host}gradients", bytes_per_parameter=4))
    if stage == 3:
        persistent = partial(_persistent, largest=config.persistent)
        parts.append(sharded(name="weights", bytes_per_parameter=compute, cut=persistent))
    if (ranks := config.zero_hpz_partition_size) > 1:  # ZeRO++: a second copy
        secondary = partial(_secondary, largest=config.persistent)
        parts.append(
            StatePart(name="weights", bytes_per_parameter=compute, shard_ranks=ranks, cut=secondary)
        )
    if stage == 1 and half and not config.offloads:
        parts.append(replicated(name="gradients", bytes_per_parameter=compute))
    else:
        reduced = 2 if config.communication_data_type == "bf16" else 4
        width = {1: 4, 2: compute, 3: reduced}[stage]
        buckets = 1 + (stage < 3 and config.overlaps(precision, device))
        bucket = partial(_bucket, max_elements=config.reduce_bucket_size or largest_bucket)
        parts.append(replicated(name="buffers", bytes_per_parameter=width * buckets, cut=bucket))
    if config.offloads:
        parts += _staging(stage, compute, half=half, sharded=sharded)
    return parts


def _staging(
    stage: int, compute: int, *, half: bool, sharded: partial[StatePart]
) -> list[StatePart]:
    """Return the buffers through which weights and gradients travel to host memory and back."""
    if stage == 3:
        return [sharded(name=f"{HOST}gradients", bytes_per_parameter=4)]
    parts = [
        sharded(name=f"{HOST}weights", bytes_per_parameter=compute),
        StatePart(name=f"{HOST}gradients", bytes_per_parameter=compute, cut=largest_parameter),
        StatePart(name="gradients", bytes_per_parameter=compute, cut=largest_parameter),
    ]
    if stage == 1 or not half:
        parts.append(sharded(name=f"{HOST}gradients", bytes_per_parameter=4))
    else:
        parts.append(sharded(name="gradients", bytes_per_parameter=4))
    return parts


def bucket_elements(parameters: int, largest: int) -> int:
    """Return the elements of a DeepSpeed bucket: the rank's parameters, up to a limit."""
    return min(-(-parameters // 256) * 256, largest)  # DeepSpeed needs an even number


def _bucket(shapes: Shapes, ranks: int, *, max_elements: int) -> int:
    return bucket_elements(elements(shapes.values()), max_elements)


def largest_parameter(shapes: Shapes, ranks: int) -> int:
    """Return the elements of the largest parameter."""
    return max(map(math.prod, shapes.values()), default=0)


def _persistent(shapes: Shapes, ranks: int, *, largest: int) -> int:
    """Return the elements of small parameters, of which all ranks also keep an unsharded copy."""
    if ranks == 1:  # the shard is unsharded already
        return 0
    return elements(shape for shape in shapes.values() if math.prod(shape) <= largest)


def _secondary(shapes: Shapes, ranks: int, *, largest: int) -> int:
    """Return the elements of ZeRO++'s secondary shards; small parameters have none."""
    sharded = {name: shape for name, shape in shapes.items() if math.prod(shape) > largest}
    return cut_parameters(sharded, ranks)
