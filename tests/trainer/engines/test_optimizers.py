"""The table of optimizers: arithmetic and state of AdamW, and an optimizer that a test adds."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import forked
from torch import nn

from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.engines.optimizers.base import Optimizer, ParameterGroup
from headrace.trainer.engines.optimizers.muon import MuonConfig
from headrace.trainer.engines.optimizers.states import ADAM


def adamw(parameter: nn.Parameter, decay: float = 0.0, **options: Any) -> Optimizer:
    group = ParameterGroup(("w",), match=None, lr=1.0, weight_decay=decay, states=ADAM)
    return AdamWConfig(**options).build(None, [group], {"w": parameter})  # type: ignore[arg-type]


def test_a_group_decays_by_its_own_rate() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    built = adamw(parameter, decay=0.1, lr=0.1)
    parameter.grad = torch.zeros_like(parameter)
    built.step()
    assert torch.allclose(parameter, torch.full((3, 2), 1 - 0.1 * 0.1))


def test_moments_exist_before_the_first_step_and_are_live() -> None:
    parameter = nn.Parameter(torch.ones(4, 2))
    built = adamw(parameter)
    before = built.state_tensors(parameter, ADAM)
    assert not any(moment.any() for moment in before.values())
    parameter.grad = torch.ones_like(parameter)
    built.step()
    assert torch.allclose(before["exp_avg"], torch.full((4, 2), 0.1))


def test_the_bias_correction_depends_on_the_number_of_steps() -> None:
    """The first step moves by lr whatever the gradient; step 100 with fresh moments does not."""
    moved = []
    for steps in (0, 99):
        parameter = nn.Parameter(torch.zeros(1, 1))
        built = adamw(parameter, lr=1.0)
        built.state_tensors(parameter, ADAM)
        built.loaded(steps)
        parameter.grad = torch.ones(1, 1)
        built.step()
        moved.append(float(-parameter.detach()))
    assert moved[0] == pytest.approx(1.0) and moved[1] == pytest.approx(0.1 / 0.05**0.5, rel=0.01)


def test_all_invalid_values_are_reported() -> None:
    with pytest.raises(ValueError, match=r"lr must be above 0, not -1; beta2 must be in \[0, 1\)"):
        AdamWConfig(lr=-1, beta2=1)
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), not 1; iterations must"):
        MuonConfig(momentum=1, iterations=0)


DUMMY = '''
    """Optimizer that steps by the sign of an averaged gradient."""

    from dataclasses import dataclass
    from typing import Literal

    import torch

    from headrace.trainer.engines.optimizers import OPTIMIZERS
    from headrace.trainer.engines.optimizers.base import Optimizer, torch_groups
    from headrace.trainer.engines.optimizers.config import OptimizerConfig


    @dataclass(frozen=True, kw_only=True)
    class SignsConfig(OptimizerConfig):
        """Step by the sign of an averaged gradient."""

        kind: Literal["signs"] = "signs"
        keep: float = 0.5
        """Fraction of the average that a step keeps."""

        def describe(self):
            return "signs"

        def states(self, model):
            return {name: ("average",) for name, _ in model.named_parameters()}

        def build(self, model, groups, parameters):
            return Signs(torch_groups(groups, parameters), {"lr": self.lr, "keep": self.keep})


    class Signs(Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        average = self.state_tensors(tensor, ("average",))["average"]
                        average.lerp_(tensor.grad, 1 - group["keep"])
                        tensor.add_(average.sign(), alpha=-group["lr"])


    OPTIMIZERS["signs"] = SignsConfig
'''


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_an_optimizer_is_a_file_and_a_line(trainer: Any, tmp_path: Path, engine: str) -> None:
    """The command trains with it on two ranks, saves its state, and resumes to the bit."""
    added = tmp_path / "signs.py"
    added.write_text(textwrap.dedent(DUMMY))
    words = ["optimizer.kind=signs", "optimizer.keep=0.25", f"engine.kind={engine}"]

    def run(out: Path, *more: str) -> None:
        command = trainer.command(*words, "--processes", "2", *more, out=out)
        done = forked.run(command, plugin=added)
        assert done.returncode in (0, 85), done.stderr

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(whole)
    run(stopped, "--stop-after", "3")
    run(stopped)
    losses = trainer.losses(whole)
    assert losses == trainer.losses(stopped) and len(set(losses)) == 6
    checkpoint = sorted((whole / "checkpoints").glob("step-*"))[-1]
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 6
    metadata = (checkpoint / "tensors" / ".metadata").read_bytes()
    assert b"average.embedding.weight" in metadata and b"exp_avg" not in metadata
