"""Executed instructions: machine code is counted as often as its loops turn."""

from __future__ import annotations

import pytest

from benchmarks.long._executed import Executed, Instruction, count_executed, find_loops

PROGRAM = [
    Instruction(0, "LDG.E.128", None),
    Instruction(16, "FADD", None),  # both loops
    Instruction(32, "LDGSTS.E.BYPASS.LTC128B.128", None),
    Instruction(48, "STG.E.U16", None),
    Instruction(56, "BAR.SYNC.DEFER_BLOCKING", None),
    Instruction(64, "BRA", 32),
    Instruction(80, "BRA", 16),
    Instruction(96, "BRA", 96),  # the end, which is no loop
    Instruction(112, "NOP", None),
]


def test_an_inner_loop_turns_in_each_turn_of_the_outer_one() -> None:
    assert find_loops(PROGRAM) == [(16, 80), (32, 64)]
    assert count_executed(PROGRAM, (2, 3)) == Executed(
        instructions=2 + 2 * 2 + 6 * 4, bytes=32 * (16 + 6 * 16 + 6 * 2), barriers=6
    )


def test_a_loop_of_unknown_turns_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 loops, but turns of 1"):
        count_executed(PROGRAM, (2,))
