"""Binaries of next programs beside the confirmed ones whose place they would take.

A line has a launch's registers, spilled bytes, shared memory and instructions, among these loads
(LDG) and loads ahead of their use into shared memory (LDGSTS), and the warps that a multiprocessor
holds. Sizes are those of a large model. Nothing runs: a device must confirm what counts promise.

    python -m benchmarks.long.next_binaries [--cards 90 80 100]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / ".root"))  # headrace, if it is not installed
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
import triton
from support.kernels.binaries import Launch, compiled, launches

from headrace.models.attestation.cases.case import Case, InputShape
from headrace.models.attestation.cases.scans import ssd_case
from headrace.models.attestation.cases.tokens import gated_norm_case, norm_case
from headrace.models.kernels import NEXT, choice

SIZE = InputShape(1, 512, 4096)
REGISTERS = 1 << 16
SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Bytes of a multiprocessor's shared memory, by capability; a program takes a KiB more."""
INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)", re.MULTILINE
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", nargs="*", type=int, default=[90, 80, 100])
    cards = parser.parse_args().cards
    warnings.simplefilter("ignore")
    print(f"triton {triton.__version__}, bfloat16; compiled, not run: no device is needed")
    cases = [
        ssd_case(1, 64, state=False, packed=True, head_dim=64, state_size=128),
        norm_case(outside=False, residual=True),
        norm_case(outside=False),
        gated_norm_case(1),
    ]
    for case in cases:
        confirmed, following = (list_launches(case, kernels) for kernels in ((), NEXT))
        for label, some, others in (
            ("confirmed", confirmed, following),
            ("next", following, confirmed),
        ):
            for launch in some:
                if launch not in others:
                    for card in cards:
                        print(f"{label} {describe(launch, card)}", flush=True)
    return 0


def list_launches(case: Case, kernels: Iterable[str]) -> list[Launch]:
    """Return the launches of one rank, with the next programs of these kernels."""
    with choice.next_programs(kernels):
        every = launches(case, SIZE, torch.bfloat16)
    return [launch for launch in every if not dict(launch.constants).get("CUT")]


def describe(launch: Launch, card: int) -> str:
    binary = compiled(launch, card)
    names = INSTRUCTION.findall(_disassemble(binary.cubin))
    loads, loads_ahead = (
        sum(name.split(".")[0] == opcode for name in names) for opcode in ("LDG", "LDGSTS")
    )
    warps = dict(launch.options)["num_warps"]
    programs = min(
        REGISTERS // (binary.registers * 32 * warps), SHARED[card] // (binary.shared + 1024)
    )
    spills = f", {binary.spilled} bytes spilled" if binary.spilled else ""
    return (
        f"{launch.name} sm_{card}: {programs * warps} warps, {binary.registers} registers{spills}, "
        f"{binary.shared} bytes shared, {len(names)} instructions, {loads} LDG, {loads_ahead} "
        f"LDGSTS [{launch.configuration}]"
    )


def _disassemble(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout


if __name__ == "__main__":
    sys.exit(main())
