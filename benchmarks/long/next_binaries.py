"""Binaries of next programs beside the confirmed ones whose place they would take.

A line has a launch's registers, spilled bytes, shared memory, instructions, and among these loads
ahead of their use into shared memory (LDGSTS), and the warps that a multiprocessor holds; then what
one token costs on sm_90: the instructions that its warps execute (_executed.py), the barriers at
which they wait, the bytes of all arguments, each once, and the bytes between the multiprocessors
and the L2 cache. The sums of a pass follow, beside its floor: the bytes of the op's inputs and
outputs, each once. Sizes are those of a large model. Beside SSD stand the programs of mamba_ssm,
where its source is (_mamba_programs.py). Nothing runs: a device must confirm what counts promise.

    python -m benchmarks.long.next_binaries [--cards 90 80 100] [--only modal]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / ".root"))  # headrace, if it is not installed
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
import triton
from support.kernels.binaries import Launch, compiled, launches_by_pass

from headrace.models.attestation.cases.case import Case, InputShape
from headrace.models.attestation.cases.convolutions import direct_case, modal_case
from headrace.models.attestation.cases.scans import ssd_case
from headrace.models.attestation.cases.tokens import gated_norm_case, norm_case
from headrace.models.kernels import NEXT, choice

from . import _mamba_programs
from ._executed import Instruction, count_executed, disassemble
from ._mamba_programs import Scan

SIZE = InputShape(1, 4096, 4096)
SCAN_SIZE, MODES = InputShape(1, 16384, 4096), 16
HEADS, HEAD_DIM, STATE_SIZE = 64, 64, 128
REGISTERS = 1 << 16
SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Bytes of a multiprocessor's shared memory, by capability; a program takes a KiB more."""

COUNTED_CARD = 90
"""Capability whose loops TURNS knows: machine code of others has other loops."""
FILTER_FLOORS = (
    ("q, k, v in; y out", 2 * 4 * SIZE.width),
    ("q, k, v, dy in; dq, dk, dv out", 2 * 7 * SIZE.width),
)

FEATURIZER_FLOORS = (("x in; y out", 4 * SIZE.width), ("x, dy in; dx out", 6 * SIZE.width))


def _tiles(constants: dict[str, Any], launch: Launch) -> Sequence[float]:
    """Return the chunks of a stream, if a program filters a tile in each turn."""
    tile_numbers = constants["CHUNK"] * constants["CHUNKS"] * constants["SIDE"]
    return (SIZE.length * SIZE.width / tile_numbers / launch.programs,)


def _block_heads(constants: dict[str, Any], launch: Launch) -> Sequence[float]:
    """Return the heads of a program, which each chunk has."""
    return (SCAN_SIZE.length / constants["CHUNK"] * HEADS / launch.programs,)


def _partial_sums(constants: dict[str, Any], launch: Launch) -> Sequence[float]:
    """Return the blocks of heads whose gradients are summed, from the bytes of all."""
    numbers = 2 * SCAN_SIZE.length * STATE_SIZE  # of B and C
    return ((launch.bytes / numbers - 2) / 4,)


def _modal_tokens(constants: dict[str, Any], launch: Launch) -> float:
    """Return the tokens of a program that has CHANNELS channels."""
    return SCAN_SIZE.length * SCAN_SIZE.width / constants["CHANNELS"] / launch.programs


def _modal_tiles(constants: dict[str, Any], launch: Launch) -> Sequence[float]:
    return (_modal_tokens(constants, launch) / (constants["BLOCK"] * constants["BLOCKS"]),)


def _modal_groups(constants: dict[str, Any], launch: Launch) -> Sequence[float]:
    return (_modal_tokens(constants, launch) / constants["UNROLL"],)


def _modal_chunks(constants: dict[str, Any], launch: Launch) -> Sequence[float]:
    """Return the turns of a scan over chunks, from the bytes of their states."""
    return (launch.bytes / (4 * MODES * SCAN_SIZE.width) / constants["AHEAD"],)


Turns = Callable[[dict[str, Any], Launch], Sequence[float]]
TURNS: dict[str, Turns] = {
    "ssd_span_states": lambda c, _: (c["CHUNKS"],),
    "ssd_scan_states": lambda c, _: (SCAN_SIZE.length / (c["AHEAD"] * 256),),
    "ssd_outputs": lambda c, _: (c["CHUNKS"],),
    # Of pairs of chunks; half of them have a span in common, the others end at once.
    "ssd_backward_pairs": lambda c, _: (c["HEADS"],) if c["SAME"] else (1 / 3, c["HEADS"] / 2),
    "ssd_backward_BC": lambda c, _: (2.5, 1.5, c["HEADS"]),
    "ssd_backward_sum_BC": _partial_sums,
    "ssd_backward_dt": lambda c, _: (4, 0, c["CHUNKS"], c["CHUNKS"]),
    "ssd_walk_states": lambda c, _: (SCAN_SIZE.length / c["CHUNK"],),
    "ssd_chunk_outputs": _block_heads,
    "ssd_backward_scores": lambda c, launch: (3 * _block_heads(c, launch)[0],),
    "ssd_backward_states": _block_heads,
    "ssd_backward_decays": lambda c, _: (0, 2),
    "rms_norm_backward": lambda c, launch: (SIZE.length / launch.programs,),
    "short_convolution_forward": lambda c, _: (c["SPAN"] / c["UNROLL"],),
    "toeplitz_backward": _tiles,
    "toeplitz_backward_carried": _tiles,
    "modal_chunk_states": _modal_tiles,
    "modal_forward": _modal_tiles,
    "modal_backward": _modal_tiles,
    "modal_scan_states": _modal_chunks,
    "modal_walk_chunk_states": _modal_groups,
    "modal_walk_outputs": _modal_groups,
    "modal_walk_inputs": _modal_groups,
    "gated_rms_norm_backward": lambda c, launch: (SIZE.length / launch.programs,),
}
"""Turns of a program's loops, in the order of their addresses, from its constants."""


@dataclass
class PassCounts:
    """Counts of a pass, for one token."""

    tokens: int
    instructions: float = 0.0
    bytes: float = 0.0
    l2_bytes: float = 0.0
    barriers: float = 0.0

    def add(self, launch: Launch, card: int, scan: Scan | None = None) -> str:
        """Add a launch, one of mamba_ssm's if a scan is given, and return its line."""
        binary = compiled(launch, card)
        instructions = disassemble(binary.cubin)
        warps = dict(launch.options).get("num_warps", 4)
        resident = min(
            REGISTERS // (binary.registers * 32 * warps), SHARED[card] // (binary.shared + 1024)
        )
        ahead = sum(instruction.opcode == "LDGSTS" for instruction in instructions)
        spills = f", {binary.spilled} bytes spilled" if binary.spilled else ""
        counts = (
            f"; a token: {self._count(launch, instructions, scan)}" if card == COUNTED_CARD else ""
        )
        return (
            f"{launch.name} sm_{card}: {resident * warps} warps, {binary.registers} registers"
            f"{spills}, {binary.shared} bytes shared, {len(instructions)} instructions, {ahead} "
            f"LDGSTS{counts} [{launch.configuration}]"
        )

    def _count(self, launch: Launch, instructions: Sequence[Instruction], scan: Scan | None) -> str:
        """Add what a launch executes and moves."""
        if scan is not None:
            turns = scan.turns(launch, instructions)
        else:
            turns = TURNS.get(launch.name, lambda *_: ())(dict(launch.constants), launch)
        executed = count_executed(instructions, turns)
        share = dict(launch.options).get("num_warps", 4) * launch.programs / self.tokens
        self.instructions += executed.instructions * share
        self.bytes += launch.bytes / self.tokens
        self.l2_bytes += executed.bytes * share
        self.barriers += executed.barriers * share
        return (
            f"{executed.instructions * share:,.0f} instructions, {executed.barriers * share:,.0f} "
            f"barriers, {launch.bytes / self.tokens / 1024:.1f} KiB, "
            f"L2 {executed.bytes * share / 1024:.1f} KiB"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", nargs="*", type=int, default=[90, 80, 100])
    parser.add_argument("--only", nargs="*", default=[], help="kernels; all by default")
    options = parser.parse_args()
    cards, only = options.cards, options.only
    warnings.simplefilter("ignore")
    print(f"triton {triton.__version__}, bfloat16; compiled, not run: no device is needed")
    packed_ssd = ssd_case(
        1, HEADS, state=False, packed=True, head_dim=HEAD_DIM, state_size=STATE_SIZE
    )
    inner, scores = HEADS * HEAD_DIM, 2 * STATE_SIZE
    ssd_floors = (
        ("x, B, C, dt in; y out", 2 * (2 * inner + scores + HEADS)),
        ("x, B, C, dt, dy in; dx, dB, dC, ddt out", 2 * (3 * inner + 2 * scores + 2 * HEADS)),
    )
    modal = modal_case(MODES, gates=True, state=False, packed=False)
    for case, floors, size in (
        (packed_ssd, ssd_floors, SCAN_SIZE),
        (norm_case(outside=False, residual=True), None, SIZE),
        (norm_case(outside=False), None, SIZE),
        (gated_norm_case(1), None, SIZE),
        (direct_case("toeplitz", 128, 16), FILTER_FLOORS, SIZE),
        (direct_case("short_convolution", 3, 1, gated=False), FEATURIZER_FLOORS, SIZE),
        (modal, FILTER_FLOORS, SCAN_SIZE),
    ):
        if not only or case.kernel in only:
            for card in cards:
                compare(case, floors, card, size)
    return 0


def compare(
    case: Case, floors: Sequence[tuple[str, int]] | None, card: int, size: InputShape
) -> None:
    """Print the launches of a case that differ, and the sums of its passes; those of mamba_ssm's
    scan, where it is installed, follow."""
    scan = Scan(size.length, HEADS, HEAD_DIM, STATE_SIZE)
    peers = (
        _mamba_programs.list_launches(scan)
        if case.kernel == "ssd" and card == COUNTED_CARD
        else ([], [])
    )
    confirmed, following = (list_launches(case, kernels, size) for kernels in ((), NEXT))
    for index, name in enumerate(("forward", "backward")):
        if confirmed[index] == following[index]:
            continue
        sums = []
        for label, launches in (
            ("confirmed", confirmed[index]),
            ("next", following[index]),
            ("mamba_ssm", peers[index]),
        ):
            counts = PassCounts(size.rows * size.length)
            for launch in launches:
                line = counts.add(launch, card, scan if launches is peers[index] else None)
                print(f"{label} {line}", flush=True)
            if launches:
                sums.append(
                    f"{label} {counts.instructions:,.0f} instructions, {counts.barriers:,.0f} "
                    f"barriers, {counts.bytes / 1024:.1f} KiB, L2 {counts.l2_bytes / 1024:.1f} KiB"
                )
        if card == COUNTED_CARD:
            floor = ""
            if floors is not None:
                formula, floor_bytes = floors[index]
                floor = f"; floor {floor_bytes / 1024:.1f} KiB: {formula}"
            print(f"= {case.kernel} {name} sm_{card}, a token: {'; '.join(sums)}{floor}")


def list_launches(
    case: Case, kernels: Iterable[str], size: InputShape = SIZE
) -> tuple[list[Launch], list[Launch]]:
    """Return the launches of a forward and a backward pass, with the next programs of these
    kernels."""
    with choice.next_programs(kernels):
        return launches_by_pass(case, size, torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
