"""Seconds of the optimizer step, and of copies to host memory, where it may be offloaded."""

from __future__ import annotations

from ...trainer.engines.traffic import Message, Traffic
from .machine import Machine


def price_host_copy(machine: Machine, traffic: Traffic, message: Message, size: float) -> float:
    """Return the seconds in which a rank's shard of `size` bytes moves before or after a message:
    weights from host memory, or gradients to it."""
    moved = "gather" if message == "gather" else "reduce"
    return machine.host_copy(size) if moved in traffic.on_host else 0.0


def price_optimizer(
    machine: Machine, traffic: Traffic, parameters: float, weight_bytes: float
) -> float:
    """Return the seconds in which a rank updates its parameters, on the device or on the CPU."""
    size = machine.program.update_bytes * parameters
    if "update" not in traffic.on_host:
        return machine.copy_seconds(size)
    seconds = machine.host_update(size)
    if "weights" in traffic.on_host:
        seconds += machine.host_copy(weight_bytes * parameters)
    return seconds
