"""Instructions that a program executes and bytes that it moves, from its machine code.

A loop of the machine code ends with a branch backwards. With the number of its turns, which the
caller knows, instructions are counted as often as they run. All of a program's code counts, also
what a predicate or a forward branch skips: counts are upper bounds.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

LINE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE
)
WARP = 32
SCHEDULERS = 4
"""Instructions that a multiprocessor issues in a cycle."""
GLOBAL = ("LDG", "LDGSTS", "STG", "RED", "ATOMG")
"""Instructions that move bytes between a multiprocessor and the L2 cache."""


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    target: int | None
    """Address to which a branch jumps."""

    @property
    def opcode(self) -> str:
        return self.name.split(".")[0]

    @property
    def bytes(self) -> int:
        """Bytes that a warp moves from or to global memory."""
        if self.opcode not in GLOBAL:
            return 0
        parts = self.name.split(".")
        width = next((int(part) for part in reversed(parts) if part in ("64", "128")), 32)
        if any(part in ("U8", "S8", "8") for part in parts):
            width = 8
        if any(part in ("U16", "S16", "16") for part in parts):
            width = 16
        return width // 8 * WARP


@dataclass(frozen=True)
class Executed:
    """Counts of one warp."""

    instructions: float
    bytes: float
    barriers: float


def disassemble(cubin: bytes) -> list[Instruction]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    instructions = []
    for address, name, operands in LINE.findall(listing):
        target = re.search(r"\b0x([0-9a-f]+)\s*$", operands) if name.startswith("BRA") else None
        instructions.append(
            Instruction(int(address, 16), name, int(target[1], 16) if target else None)
        )
    return instructions


def find_loops(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """Return the first and last address of each loop, in order."""
    ends: dict[int, int] = {}
    for instruction in instructions:
        if instruction.target is not None and instruction.target < instruction.address:
            ends[instruction.target] = instruction.address
    return sorted(ends.items())


def count_executed(instructions: Sequence[Instruction], turns: Sequence[float]) -> Executed:
    """Count what a warp executes if its loops, in the order of their addresses, take so many
    turns. An inner loop's turns are those of one turn of the outer loop."""
    loops = find_loops(instructions)
    if len(loops) != len(turns):
        raise ValueError(f"{len(loops)} loops, but turns of {len(turns)}: {loops}")
    executed, moved, barriers = 0.0, 0.0, 0.0
    for instruction in instructions:
        if instruction.name.startswith("NOP"):
            continue
        times = 1.0
        for (first, last), count in zip(loops, turns, strict=True):
            if first <= instruction.address <= last:
                times *= count
        executed += times
        moved += times * instruction.bytes
        barriers += times * (instruction.opcode == "BAR")
    return Executed(executed, moved, barriers)
