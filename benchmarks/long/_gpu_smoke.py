"""First minutes on a device: its rates, and one training step beside plain torch.

The step: packed rows, hybrid-1b, bf16, the FSDP2 engine with AdamW. Three engines take it from the
same weights: with kernels, in plain torch, and in plain torch and fp32, the reference. Loss, norm
and each gradient of the kernels may be at most twice as far from the reference as those of plain
torch, with the bound of the kernel checks on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.models.attestation.trials import BOUNDS
from headrace.models.documents import Documents
from headrace.trainer.engines.update import update
from headrace.trainer.run.process import order_attention

from ._gpu_lines import Line, Sizes
from ._gpu_run import build, clear, make_job
from ._kernel_measures import Clock
from ._tasks import WRONG

MODEL = "hybrid-1b"


def rates(dry: bool) -> int:
    """Print the rates of a copy and of a matrix product."""
    clock = Clock(dry)
    print(
        f"a copy reads and writes {clock.number(clock.bandwidth / 1e12)} TB/s, a product of "
        f"matrices in bf16 runs at {clock.number(clock.rate / 1e12)} TFLOP/s",
        flush=True,
    )
    return 0


@dataclass(frozen=True)
class Step:
    loss: Tensor
    norm: Tensor
    gradients: dict[str, Tensor]

    def values(self) -> dict[str, Tensor]:
        gradients = {f"gradient of {name}": value for name, value in self.gradients.items()}
        return {"loss": self.loss, "norm": self.norm, **gradients}


def take_step(sizes: Sizes, line: Line) -> Step:
    """Take one step from the initial weights."""
    tokens, model = sizes.smoke_tokens, sizes.model(MODEL)
    engine = build(line, sizes)
    generator = torch.Generator().manual_seed(1)
    row = torch.randint(model.vocab_size, (1, tokens + 1), generator=generator)
    ends = [end for end in sizes.boundaries(line, 0) if end < tokens]
    cuts = torch.tensor([*ends, tokens], dtype=torch.int32)
    documents = Documents.build(cuts, (1, tokens)).to(engine.device)
    row, weights = row.to(engine.device), torch.ones(1, tokens, device=engine.device)
    with order_attention(make_job(line, sizes).run):
        sums = engine(row[:, :-1], row[:, 1:], weights, documents)
        engine.backward(sums.total / tokens, last=True)
    result = [
        (gradient.parameter, gradient.data.detach().clone()) for gradient in engine.gradients()
    ]
    norm = update(engine, 1e-4).grad_norm
    return Step(sums.total.detach() / tokens, torch.tensor(norm), dict(result))


def error(got: Tensor, expected: Tensor) -> float:
    """Return ‖got − wanted‖ / ‖wanted‖; infinite for a NaN."""
    off = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    return float(off.nan_to_num(nan=float("inf")))


def smoke(dry: bool) -> int:
    """Compare a step of the kernels with plain torch. Return 1 if it is wrong."""
    sizes, steps = Sizes(dry), {}
    compared = {
        # In a dry run, on the CPU, they run in Triton's interpreter.
        "kernels": Line(model=MODEL, kernels="triton" if dry else "auto"),
        "plain torch": Line(model=MODEL, kernels="torch"),
        "fp32": Line(model=MODEL, kernels="torch", precision="fp32"),
    }
    for name, line in compared.items():
        steps[name] = take_step(sizes, line).values()
        clear(sizes.device)
        loss, norm = (float(steps[name][item]) for item in ("loss", "norm"))
        print(f"{name}: loss {loss:.5f}, norm {norm:.5f}", flush=True)
    wrong, errors = 0, {}
    for name, expected in steps["fp32"].items():
        ours, plain = (error(steps[kind][name], expected) for kind in ("kernels", "plain torch"))
        errors[name] = ours
        if not ours <= 2 * plain + BOUNDS["bfloat16"]:
            wrong += 1
            print(f"{WRONG} {name}: error {ours:.1e}, that of plain torch {plain:.1e}", flush=True)
    worst = max(errors, key=errors.__getitem__)
    print(f"{len(errors)} values compared; largest error {errors[worst]:.1e}, {worst}", flush=True)
    return 1 if wrong else 0
