"""Messages of an engine: those beside the computation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.models.options.precision import PRECISIONS
from headrace.trainer.costs.hardware import Hardware
from headrace.trainer.costs.planner.machine import Machine
from headrace.trainer.costs.planner.messages import EngineMessages
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.layout.config import LayoutConfig

FP32 = PRECISIONS["fp32"]


def test_a_group_that_fills_a_node_shares_its_processor() -> None:
    """Where both take the sum of their times, no message of a node's ranks is free."""
    hardware = Hardware.load("h100")
    turns = replace(hardware.file.overlap["node"], compute=2.0, communication=2.0)
    hidden = replace(turns, compute=1.0, communication=1.0)
    file = replace(hardware.file, overlap={"node": turns, "network": hidden})
    machine = Machine(Hardware(file, "here.yaml"), "fp32")

    def together(dp: int, tp: int) -> float:
        layout = LayoutConfig(tp=tp)
        engine = EngineMessages(Fsdp2Config(), layout, dp, FP32, machine)
        return engine.together(1.0, 0.25)

    node = machine.per_node
    assert together(node, 1) == together(node // 2, 2) == pytest.approx(1.25)
    assert together(2 * node, 1) == together(node, 2) == pytest.approx(1.0)
