"""Parameters with a learning rate of 0: no gradient, no part in the norm, no states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks.ranks import Ranks
from support.tasks import freezing
from support.tasks.freezing import FROZEN, batch, config, optimizer

from headrace.console.errors import LayoutError
from headrace.models.accounting.count import build_meta
from headrace.models.accounting.state import Degrees, state_bytes
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.model.model import Model, initial_weights
from headrace.trainer.accounting.state import frozen_parts
from headrace.trainer.checkpoints.store import name as step_name
from headrace.trainer.checkpoints.weights import read_weights
from headrace.trainer.engines.groups import check_trained, local_shards, parameter_groups

PLACES = [("fsdp2", "fp32"), ("fsdp2", "bf16"), ("zero1", "bf16"), ("zero3", "bf16")]


def frozen_names() -> frozenset[str]:
    groups = parameter_groups(build_meta(config()), optimizer(frozen=True))
    return frozenset(name for group in groups if group.frozen for name in group.names)


def norms() -> tuple[float, float]:
    """Return the norms of the gradients of the trained parameters, and of all, by autograd."""
    model = Model(config())
    with torch.no_grad():
        for name, tensor in initial_weights(config(), 3).items():
            model.get_parameter(name).copy_(tensor)
    tokens, targets, ones = batch()
    (model.loss(model.hidden(tokens)[0], targets, ones)[0] / 32).backward()
    squares = {name: float(p.grad.square().sum()) for name, p in model.named_parameters()}
    trained = [square for name, square in squares.items() if name not in frozen_names()]
    return sum(trained) ** 0.5, sum(squares.values()) ** 0.5


@pytest.mark.parametrize(("engine", "precision"), PLACES)
def test_frozen_parameters_have_neither_gradients_nor_states(
    two_ranks: Ranks, engine: str, precision: str
) -> None:
    frozen, model = frozen_names(), build_meta(config())
    names = {name for name, _ in model.named_parameters()}
    assert frozen and frozen < names
    for rank in two_ranks.run("freezing.step", engine, precision, frozen=True):
        assert rank["counted"] <= names - frozen and rank["changed"] == names - frozen
        assert all(rank["states"].get(name, {"master"}) == {"master"} for name in frozen)
        assert rank["rounded"]
        trained, everything = norms()
        assert rank["norm"] == pytest.approx(trained, rel=1e-4 if precision == "fp32" else 0.02)
        assert trained < 0.95 * everything, "the norm can tell"
        fp32 = frozenset(model.full_precision(PRECISIONS[precision]))
        parts = state_bytes(
            frozen_parts(frozen, fp32, PRECISIONS[precision]),
            {name: shard for name, shard in local_shards(model).items() if name in frozen},
            Degrees(dp=2),
        )
        assert parts["weights"] == rank["weights"]
        assert 0 <= parts.get("masters", 0) - rank["masters"] < 4 * len(frozen), "rounded up"


def test_without_frozen_groups_all_parameters_move(two_ranks: Ranks) -> None:
    names = {name for name, _ in build_meta(config()).named_parameters()}
    for rank in two_ranks.run("freezing.step", "fsdp2", "fp32", frozen=False):
        assert rank["changed"] == names and rank["norm"] == pytest.approx(norms()[1], rel=1e-4)
        assert all({"master", "ema"} < kinds for kinds in rank["states"].values())


def test_frozen_masters_are_in_checkpoints_of_every_engine(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Their average is their weights; the average of the others began at theirs."""
    for rank in two_ranks.run("freezing.save_and_load", tmp_path, "zero1", "fsdp2", "bf16"):
        assert all(rank)
    stored, averages = (read_weights(tmp_path / step_name(1), kind) for kind in ("master", "ema"))
    expected = {name: weight.float() for name, weight in dict(initial_weights(config(), 3)).items()}
    assert set(stored) == set(averages) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor) and torch.equal(averages[name], tensor)


def test_a_run_that_trains_nothing_is_refused() -> None:
    model = build_meta(config())
    for match, nothing in (("*", True), (FROZEN[0], False)):
        group = freezing.GroupConfig(match=match, lr=0.0)
        groups = parameter_groups(model, freezing.MuonConfig(groups=(group,)))
        if nothing:
            with pytest.raises(LayoutError, match="freezes all parameters of stage 1"):
                check_trained(groups, " of stage 1")
        else:
            check_trained(groups)
