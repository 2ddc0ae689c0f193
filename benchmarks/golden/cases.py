"""Cases of the golden runs: models, layouts, forms, and the bounds of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .corpus import TOTAL_STEPS

THREADS = 1
"""Threads of each rank. With one, no sum depends on how threads divide it."""
LEARNING_RATE = 1e-3


class GoldenError(Exception):
    """User mistake or failed run: what failed, and a hint how to fix it."""

    def __init__(self, message: str, hint: str, *, code: int = 1) -> None:
        super().__init__(f"{message}\n  hint: {hint}")
        self.code = code


@dataclass(frozen=True)
class Layout:
    processes: int
    options: tuple[str, ...]
    micro_batch: int
    """Tokens of a micro-batch, in rows of the first phase."""


DEEPSPEED = "engine.extra={steps_per_print: 1000000}"
"""Keeps DeepSpeed where one rank holds the whole state."""
LAYOUTS = {
    "one": Layout(1, ("engine.zero=1", DEEPSPEED), 4),
    "tp2": Layout(2, ("engine.zero=1", DEEPSPEED, "layout.tp=2"), 4),
    "cp2": Layout(2, ("engine.zero=1", "layout.cp=2"), 2),
    "zero3": Layout(2, ("engine.zero=3",), 2),
    "fsdp2": Layout(2, ("engine.kind=fsdp2",), 2),
    "dp2tp2": Layout(4, ("engine.zero=2", "layout.tp=2", "recompute=block", "z_loss=1e-3"), 2),
    "cp2tp2": Layout(
        4, ("engine.kind=fsdp2", "layout.cp=2", "layout.tp=2", "layout.attention=ring"), 2
    ),
    "bf16": Layout(2, ("engine.zero=2", "precision=bf16"), 2),
}
"""Layouts by name. All but `bf16` compute in fp32."""

LENGTHS = {
    "tiny-deepseek": 32,
    "tiny-delta": 32,
    "tiny-hybrid": 64,
    "tiny-mamba": 32,
    "tiny-moe": 32,
    "tiny-transformer": 32,
    "tiny-zamba": 32,
    "hybrid-50m": 32,
}
"""Models, with the tokens of a row in the first phase: short, for two CPU cores. Rows of
tiny-hybrid cover all 128 taps of its filters in the second phase."""

BASE = ("one", "tp2", "cp2", "zero3", "fsdp2")
SHORT = {
    "tiny-deepseek": ("one",),
    "tiny-delta": ("one", "cp2"),
    "tiny-hybrid": (*BASE, "dp2tp2", "cp2tp2", "bf16"),
    "tiny-mamba": (*BASE, "cp2tp2"),
    "tiny-moe": (*BASE, "dp2tp2"),
    "tiny-transformer": (*BASE, "cp2tp2"),
    "tiny-zamba": (*BASE, "dp2tp2"),
    "hybrid-50m": ("one", "tp2", "fsdp2"),
}
LARGEST = "hybrid-50m"
QUICK = {
    "tiny-deepseek": ("one",),
    "tiny-delta": ("one",),
    "tiny-hybrid": ("one", "tp2"),
    "tiny-mamba": ("cp2",),
    "tiny-moe": ("zero3",),
    "tiny-transformer": ("one",),
    "tiny-zamba": ("fsdp2",),
}
SHORTEST = {"tiny-hybrid": ("one", "fsdp2")}


@dataclass(frozen=True)
class Form:
    """Cases and number of steps. All forms have the same plan, so that a form's steps are the first
    steps of each longer form."""

    steps: int
    cases: dict[str, tuple[str, ...]]


FORMS = {
    "shortest": Form(10, SHORTEST),
    "quick": Form(24, QUICK),
    "short": Form(200, SHORT),
    "long": Form(TOTAL_STEPS, SHORT),
}


@dataclass(frozen=True, order=True)
class Case:
    model: str
    layout: str

    def __str__(self) -> str:
        return f"{self.model} {self.layout}"

    @property
    def length(self) -> int:
        return LENGTHS[self.model]

    def words(self) -> list[str]:
        """Return the arguments of `trainer run` that make this case."""
        layout = LAYOUTS[self.layout]
        return [
            *("--model", self.model, "--processes", str(layout.processes)),
            *("device=cpu", f"micro_batch_tokens={layout.micro_batch * self.length}"),
            *(f"optimizer.lr={LEARNING_RATE}", "watch.tensorboard=false", *layout.options),
        ]


def choose(form: str, models: Sequence[str], layouts: Sequence[str]) -> list[Case]:
    """Return the cases of a form, filtered by model and layout; empty filters take all."""
    _check("model", models, LENGTHS)
    _check("layout", layouts, LAYOUTS)
    cases = [
        Case(model, layout)
        for model, named in FORMS[form].cases.items()
        for layout in named
        if (not models or model in models) and (not layouts or layout in layouts)
    ]
    cases.sort(key=lambda case: (case.model == LARGEST, LAYOUTS[case.layout].processes))
    if not cases:
        lines = [f"{model}: {', '.join(named)}" for model, named in FORMS[form].cases.items()]
        raise GoldenError(
            f"the {form} form has no case of models {', '.join(models) or '(all)'} "
            f"and layouts {', '.join(layouts) or '(all)'}",
            f"its cases are {'; '.join(lines)}",
            code=2,
        )
    return cases


def _check(kind: str, names: Sequence[str], known: Sequence[str] | dict[str, object]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise GoldenError(
            f"unknown {kind} {', '.join(unknown)}", f"{kind}s are {', '.join(known)}", code=2
        )
