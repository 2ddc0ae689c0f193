"""`headrace kernels compile`: fill a cache of programs where no GPU is, such as on a login node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ...console.errors import MisuseError
from ...console.machine import cores
from ...console.progress import Progress
from ..accounting.shape import Shape
from ..attestation.calls import model_calls
from ..attestation.plan import AttestationPlan
from ..config.config import ModelConfig
from .compile import SLOW, compile_programs
from .worker import Compilation, Request

MIN_ARCH = 80


def parse_arch(text: str) -> int:
    """Return the compute capability of `sm_90`; raise if kernels do not run on it."""
    match = re.fullmatch(r"(?:sm_)?(\d{2,3})a?", text)
    if match is None or int(match[1]) < MIN_ARCH:
        raise MisuseError(
            f"--arch {text}: not a GPU that kernels support",
            hint="sm_80 (A100), sm_89 (L4, RTX 4090), sm_90 (H100, H200), sm_100 (B200)",
        )
    return int(match[1])


def compile_model(
    config: ModelConfig,
    shape: Shape,
    *,
    arch: int,
    out: str,
    z_loss: float,
    attested: bool,
    processes: int | None = None,
) -> Compilation:
    """Compile the programs of a model's step, and those of its attestation."""
    plan = None
    if attested:
        calls = model_calls(config, shape, z_loss)
        plan = AttestationPlan(calls=calls, longest=shape.seq_len // shape.degrees.cp)
    request = Request(
        config=config,
        shapes=[shape],
        arch=arch,
        processes=processes or cores(),
        z_loss=z_loss,
        plan=plan,
    )
    with Progress("compiling programs") as progress:

        def report(count: int, total: int) -> None:
            progress.total = total
            progress.advance(count - progress.done)

        return compile_programs(request, report, cache=str(Path(out).resolve()))


def render(compilation: Compilation, arch: int) -> Iterator[str]:
    """Yield the lines of an answer."""
    yield f"{compilation} for sm_{arch}"
    for name, seconds in compilation.compiled.items():
        if seconds > SLOW:
            yield f"  {name} takes {seconds:.1f} CPU s"
    yield from (f"  {remark}" for remark in compilation.remarks())
    yield f"start the run with TRITON_CACHE_DIR={compilation.cache}"
    yield (
        "not known here, and compiled by the run: other lengths of rows or sizes of micro-batches, "
        "another layout or precision, another version of Triton or headrace; blocks compiled by "
        "torch; Triton's launcher (C)"
    )
