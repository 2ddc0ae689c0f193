"""Ranks that train with frozen parameters: a task for the ranks of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.configs import CONFIGS, DEEPSPEEDS_OWN
from support.tasks.piped import place

from headrace.models.accounting.count import build_meta
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.model.model import initial_weights
from headrace.trainer.checkpoints import saver, store
from headrace.trainer.checkpoints.fragments import masters
from headrace.trainer.checkpoints.policy import CheckpointConfig
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.engine import Engine, load_weights
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.config import GroupConfig
from headrace.trainer.engines.optimizers.muon import MuonConfig
from headrace.trainer.engines.update import update

TINY = CONFIGS / "tiny.yaml"
FROZEN = ("embedding.*", "*.mlp.*")
ENGINES: dict[str, Any] = {
    "fsdp2": Fsdp2Config(),
    "zero1": DeepSpeedConfig(zero=1, extra=DEEPSPEEDS_OWN),
    "zero3": DeepSpeedConfig(zero=3, extra=DEEPSPEEDS_OWN),
}


def config() -> ModelConfig:
    return load_model_config(TINY)


def optimizer(frozen: bool) -> MuonConfig:
    groups = tuple(GroupConfig(match=match, lr=0.0) for match in FROZEN) if frozen else ()
    return MuonConfig(lr=0.01, clip=0.0, ema=0.9, groups=groups)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, targets and weights, of which each of two ranks has a row."""
    tokens = torch.randint(0, 37, (2, 17), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:], torch.ones(2, 16)


def build(name: str, precision: str, *, frozen: bool) -> Engine:
    objective = Objective(build_meta(config()))
    parallel = place("", "tiny")
    return ENGINES[name].build(objective, optimizer(frozen), PRECISIONS[precision], parallel)


def whole(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the masters, each whole."""
    result = {
        name: torch.zeros_like(weight)
        for name, weight in dict(initial_weights(config(), 3)).items()
    }
    for master in masters(engine.fragments()):
        if master.writes:
            master.give(result[master.parameter])
    for name in sorted(result):
        dist.all_reduce(result[name])
    return result


def step(name: str, precision: str, *, frozen: bool) -> dict[str, Any]:
    """Train a step; return the norm of the gradients, the parameters that changed, the states of
    each parameter, and what is held of frozen parameters."""
    engine, rank = build(name, precision, frozen=frozen), dist.get_rank()
    before = dict(initial_weights(config(), 3))
    load_weights(engine, before)
    held = engine.frozen
    rounded = all(torch.equal(w, before[n].to(w.dtype)) for n, w in held.weights.items())
    sums = engine(*(part[rank : rank + 1] for part in batch()), None)
    engine.backward(sums.total / 32, last=True)
    counted = {gradient.parameter for gradient in engine.gradients()}
    norm = update(engine, 0.01).grad_norm
    after = whole(engine)
    states: dict[str, set[str]] = {}
    for fragment in engine.fragments():
        states.setdefault(fragment.parameter, set()).add(fragment.kind)
    return {
        "norm": norm,
        "changed": {item for item in after if not torch.equal(after[item], before[item])},
        "counted": counted,
        "states": states,
        "rounded": rounded,
        "weights": sum(weight.nbytes for weight in held.weights.values()),
        "masters": sum(master.nbytes for master in held.masters.values()),
    }


def save_and_load(folder: Path, first: str, second: str, precision: str) -> list[bool]:
    """Save with one engine, load with another; return whether all masters are equal."""
    source, target = (build(name, precision, frozen=True) for name in (first, second))
    load_weights(source, dict(initial_weights(config(), 3)))
    load_weights(target, dict(initial_weights(config(), 4)))
    group = place("", "tiny").checkpoint
    keeper = saver.Saver(folder, CheckpointConfig(), group)
    zero = {"plan_hash": "p", "updates": 0, "ledger": "", "seed": 1}
    keeper.save(source.fragments(), store.RunState(step=1, row=1, tokens=1, **zero))
    keeper.wait()
    saver.load(folder / store.name(1), target.fragments(), group)
    target.loaded(0)
    ours, theirs = whole(source), whole(target)
    computed = [torch.equal(w, target.frozen.weights[n]) for n, w in source.frozen.weights.items()]
    return [*(torch.equal(ours[name], theirs[name]) for name in ours), *computed]
