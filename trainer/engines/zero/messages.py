"""DeepSpeed's messages in a step, by ZeRO stage, for the planner.

stage   gradients                                     weights
0       summed over all ranks at the end of a step    none: ranks update all weights
1       the same                                      gathered after the update
2       summed beside each backward pass              gathered after the update
3       reduced beside each backward pass             gathered beside each pass
"""

from __future__ import annotations

from ..traffic import HostCopy, Message, Traffic
from .settings import ZeroConfig

ZERO3_LAUNCHES = 130
"""ZeRO-3's host work per block and pass, messages included, as a number of launches: hooks run
before and after every module. Measured on a CPU with messages that send nothing."""


def traffic(config: ZeroConfig, largest_bucket: int) -> Traffic:
    """Return a step's messages. `largest_bucket` is the device's default."""
    on_host: tuple[HostCopy, ...] = ("reduce", "update", "weights") if config.offloads else ()
    if config.zero == 3:
        return Traffic(
            forward=("gather",),
            backward=("reduce", "gather"),
            pass_launches=ZERO3_LAUNCHES,
            recompute_launches=ZERO3_LAUNCHES,
            on_host=on_host,
        )
    updates: dict[int, tuple[Message, ...]] = {
        0: ("all_reduce",), 1: ("all_reduce", "gather"), 2: ("gather",)
    }  # fmt: skip
    return Traffic(
        backward=("all_reduce_compute",) if config.zero == 2 else (),
        update=updates[config.zero],
        gather_bucket=config.allgather_bucket_size or largest_bucket,
        reduce_bucket=config.reduce_bucket_size or largest_bucket,
        updates_all=config.zero == 0,
        on_host=on_host,
    )
