"""Binaries of the gated delta rule beside fla's own programs, compiled for a GPU without one.

One token of a layer with decays by head, rows of one document, heads of 128 channels: instructions
that warps execute (_executed.py), the bytes of all arguments, each once, and the bytes between the
multiprocessors and the L2 cache. Of the configurations among which fla measures at the first call,
the one of four warps with the largest tiles and fewest stages is taken, which need not be its
fastest. Nothing runs.

    python -m benchmarks.long.delta_binaries [--card 90]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / ".root"))  # headrace, if it is not installed
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
import triton
from support.kernels.binaries import Launch, compiled, launches_by_pass, record_launch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from headrace.models.attestation.cases.case import InputShape
from headrace.models.attestation.cases.scans import delta_case

from ._executed import count_executed, disassemble

TOKENS, HEADS, WIDTH = 1024, 4, 128
CHUNKS = TOKENS // 64

TURNS: dict[str, Callable[[dict[str, Any]], Sequence[float]]] = {
    "delta_solve": lambda c: (WIDTH / c["VALUES"],),
    "delta_states": lambda c: (CHUNKS,),
    "delta_backward_states": lambda c: (CHUNKS,),
    "delta_backward_values": lambda c: (WIDTH / c["VALUES"],),
    "delta_backward_keys": lambda c: (WIDTH / c["VALUES"],),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": lambda c: (WIDTH / c["BK"], *[14] * 4),
    "recompute_w_u_fwd_kernel": lambda c: (WIDTH / c["BV"], WIDTH / c["BK"]),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": lambda c: (CHUNKS,),
    "chunk_fwd_kernel_o": lambda c: (WIDTH / c["BK"],),
    "chunk_bwd_kernel_dv_local": lambda c: (WIDTH / c["BK"],),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": lambda c: (CHUNKS,),
    "chunk_bwd_kernel_dqkwg": lambda c: (WIDTH / c["BV"],),
    "prepare_wy_repr_bwd_kernel": lambda c: (
        WIDTH / c["BK"],
        WIDTH / c["BV"],
        WIDTH / c["BK"],
    ),
}
"""Turns of a program's loops, in the order of their addresses, from its constants; a loop of one
turn is none."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", type=int, default=90)
    card = parser.parse_args().card
    warnings.simplefilter("ignore")
    case = delta_case(
        HEADS, HEADS, by_channel=False, state=False, packed=False, key_dim=WIDTH, value_dim=WIDTH
    )
    ours = launches_by_pass(case, InputShape(1, TOKENS, HEADS * WIDTH), torch.bfloat16)
    with pretend_hopper():
        import fla

        fla_launches = list_fla_launches()
    print(f"triton {triton.__version__}, fla {fla.__version__}; compiled for sm_{card}, not run")
    sums = {}
    for label, passes in (("headrace", ours), ("fla", fla_launches)):
        for name, launches in zip(("forward", "backward"), passes, strict=True):
            sums[name, label] = print_launches(f"{label} {name}", launches, card)
    for name in ("forward", "backward"):
        print(f"= delta {name}, a token and head: headrace {sums[name, 'headrace']}; "
              f"fla {sums[name, 'fla']}")  # fmt: skip
    return 0


def print_launches(label: str, launches: Sequence[Launch], card: int) -> str:
    """Print a line for each launch, and return the line of their sums."""
    token_heads = TOKENS * HEADS
    totals = [0.0, 0.0, 0.0]
    for launch in launches:
        binary = compiled(launch, card)
        instructions = disassemble(binary.cubin)
        warps = dict(launch.options).get("num_warps", 4)
        turns = TURNS.get(launch.name, lambda _: ())(dict(launch.constants))
        executed = count_executed(instructions, [turn for turn in turns if turn > 1])
        share = warps * launch.programs / token_heads
        counts = (
            executed.instructions * share,
            launch.bytes / token_heads,
            executed.bytes * share,
        )
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        spills = f", {binary.spilled} bytes spilled" if binary.spilled else ""
        print(
            f"{label} {launch.name}: {binary.registers} registers{spills}, {binary.shared} bytes "
            f"shared, {warps} warps; {_describe(counts)}",
            flush=True,
        )
    return _describe(totals)


def _describe(counts: Sequence[float]) -> str:
    instructions, moved, l2_bytes = counts
    return f"{instructions:,.1f} instructions, {moved:,.0f} B, L2 {l2_bytes:,.0f} B"


@contextmanager
def pretend_hopper() -> Iterator[None]:
    """Let fla choose tiles as on an H100."""
    properties = {"max_shared_mem": 232_448, "multiprocessor_count": 132}
    target = GPUTarget("cuda", 90, 32)
    device = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        utils=SimpleNamespace(get_device_properties=lambda _: properties),
    )
    answers = {
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "NVIDIA H100",
        "device_count": lambda: 1,
        "current_device": lambda: 0,
    }
    with ExitStack() as patched:
        for name, answer in answers.items():
            patched.enter_context(mock.patch.object(torch.cuda, name, answer))
        patched.enter_context(mock.patch.object(driver, "_active", device))
        yield


def list_fla_launches() -> tuple[list[Launch], list[Launch]]:
    """Return fla's launches of a forward and a backward pass."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    for module in list(sys.modules.values()):  # without the index of a device it is always False
        if getattr(module, "__name__", "").startswith("fla.") and hasattr(
            module, "check_shared_mem"
        ):
            module.check_shared_mem = lambda *_: True  # type: ignore[attr-defined]
    recorded: list[Launch] = []

    def record(program: JITFunction, *args: Any, grid: Any, **options: Any) -> None:
        if callable(grid):
            grid = grid({**dict(zip(program.arg_names, args, strict=False)), **options})
        recorded.append(record_launch(program, args, {**options, "grid": grid}))

    def tune(tuner: Any, *args: Any, **options: Any) -> None:
        tuner.fn.run(*args, **{**options, **choose(tuner.configs).all_kwargs()})

    tuners = [Autotuner, *Autotuner.__subclasses__()]
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(JITFunction, "run", record))
        for tuner in tuners:
            patched.enter_context(mock.patch.object(tuner, "run", tune))
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, TOKENS, HEADS, WIDTH, generator=generator).bfloat16().requires_grad_()
            for _ in range(3)
        )
        g = (-torch.rand(1, TOKENS, HEADS, generator=generator)).requires_grad_()
        beta = torch.rand(1, TOKENS, HEADS, generator=generator).requires_grad_()
        y = chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0)[0]
        num_forward = len(recorded)
        torch.autograd.grad(y, [q, k, v, g, beta], torch.ones_like(y))
    return recorded[:num_forward], recorded[num_forward:]


def choose(configs: Sequence[triton.Config]) -> triton.Config:
    def rank(config: triton.Config) -> tuple[int, int, int]:
        return abs(config.num_warps - 4), -sum(config.kwargs.values()), config.num_stages

    return min(configs, key=rank)


if __name__ == "__main__":
    sys.exit(main())
