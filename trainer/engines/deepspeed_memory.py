"""Memory of DeepSpeed's state by ZeRO stage, for the memory accounting.

    stage   weights   gradients       masters         optimizer   buffers
    0       all       all             the weights     all         none
    1       all       all             sharded         sharded     one bucket in fp32, none in bf16
    2       all       sharded         sharded         sharded     one bucket, as the weights
    3       sharded   sharded         sharded         sharded     one bucket in fp32

Gradients are counted at their peak: in ZeRO-1 they are whole until the last micro-batch is reduced,
and bf16 holds the gradients of the last micro-batch beside the fp32 sums. ZeRO-2 in fp32 also keeps
the gradient of the parameter on the edge of its shard; it is not counted.
"""

from __future__ import annotations

import math
from functools import partial

from ...models.accounting.state import (
    BytesPerParameter,
    Shapes,
    StatePart,
    by_parameter,
    elements,
    flat,
)
from ...models.precision import Precision

PERSISTENT = 100_000
"""Elements up to which ZeRO-3 keeps a whole copy of a parameter (DeepSpeed's default)."""


def state_layout(
    stage: int, precision: Precision, optimizer_bytes: BytesPerParameter, largest_bucket: int
) -> list[StatePart]:
    compute = precision.weight_bytes
    whole = StatePart
    sharded = partial(
        StatePart, sharded_over=("dp", "cp"), cut=by_parameter if stage == 3 else flat
    )
    if stage == 0:
        return [
            whole(name="weights", bytes_per_parameter=compute),
            whole(name="gradients", bytes_per_parameter=compute),
            whole(name="optimizer", bytes_per_parameter=optimizer_bytes),
        ]
    weights = sharded if stage == 3 else whole
    gradients = sharded if stage >= 2 else whole
    parts = [
        weights(name="weights", bytes_per_parameter=compute),
        gradients(name="gradients", bytes_per_parameter=4),
        sharded(name="masters", bytes_per_parameter=4),
        sharded(name="optimizer", bytes_per_parameter=optimizer_bytes),
    ]
    if stage == 3:
        parts.append(sharded(name="weights", bytes_per_parameter=compute, cut=_persistent))
    if stage == 1 and precision.separate_masters:
        parts.append(whole(name="gradients", bytes_per_parameter=compute))
    else:
        bucket = partial(_bucket, largest=largest_bucket)
        width = compute if stage == 2 else 4
        parts.append(whole(name="buffers", bytes_per_parameter=width, cut=bucket))
    return parts


def bucket_elements(parameters: int, largest: int) -> int:
    """Return the size of DeepSpeed's buckets: the parameters of a rank, up to a limit."""
    return min(-(-parameters // 256) * 256, largest)  # DeepSpeed wants an even number


def _bucket(shapes: Shapes, ranks: int, *, largest: int) -> int:
    return bucket_elements(elements(shapes.values()), largest)


def _persistent(shapes: Shapes, ranks: int) -> int:
    """Elements of the small parameters: each rank keeps a whole copy beside its shards."""
    if ranks == 1:  # the shard is the whole
        return 0
    return elements(shape for shape in shapes.values() if math.prod(shape) <= PERSISTENT)
