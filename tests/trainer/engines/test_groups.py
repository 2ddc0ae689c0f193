"""Parameter groups: weight decay, and learning rates by name pattern."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from support.configs import CONFIGS

from headrace.console.config import build as build_config
from headrace.console.errors import ConfigError
from headrace.models.accounting.count import build_meta
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.model.model import Model
from headrace.models.operators import OPERATORS
from headrace.trainer.engines.groups import describe_groups, parameter_groups
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.engines.optimizers.config import DecayRule, GroupConfig
from headrace.trainer.engines.optimizers.decay import NO_DECAY
from headrace.trainer.engines.optimizers.muon import MuonConfig


def tiny(name: str = "tiny") -> Model:
    return build_meta(load_model_config(CONFIGS / f"{name}.yaml"))


def chosen(model: Model, *groups: GroupConfig) -> dict[str, list[str]]:
    """Return the parameters of each pattern."""
    names: dict[str, list[str]] = {}
    for group in parameter_groups(model, AdamWConfig(groups=groups)):
        names.setdefault(str(group.match), []).extend(group.names)
    return names


def test_a_pattern_matches_names_and_operators() -> None:
    model = tiny()  # se, mr, li: Hyena; mamba; attention; each with a GLU
    hyena = chosen(model, GroupConfig(match="blocks.*.hyena*"))["blocks.*.hyena*"]
    places = {name.split(".operator.")[0] for name in hyena}
    assert places == {"blocks.0.mixer", "blocks.1.mixer", "blocks.2.mixer"}
    selections = [
        chosen(model, GroupConfig(match=match))[match]
        for match in ("blocks.1.mr.*", "blocks.1.hyena-mr.*", "blocks.1.mixer.operator.*")
    ]
    assert selections[0] == selections[1] == selections[2] and selections[0]
    glu = chosen(model, GroupConfig(match="blocks.*.glu.gate_up.*"))
    assert len(glu["blocks.*.glu.gate_up.*"]) == 5
    shared = tiny("shared")
    assert chosen(shared, GroupConfig(match="shared.zamba-block.down.weight")) == chosen(
        shared, GroupConfig(match="shared.zamba-block.down.weight")
    )
    assert chosen(shared, GroupConfig(match="shared.zamba-block.down*"))["shared.zamba-block.down*"]


def test_the_first_match_counts_and_every_parameter_is_in_one_group() -> None:
    model = tiny()
    first, second = GroupConfig(match="*.qkv.*"), GroupConfig(match="blocks.0.*")
    result = chosen(model, first, second)
    assert "blocks.0.mixer.operator.qkv.weight" in result["*.qkv.*"]
    assert "blocks.0.mixer.operator.output.weight" in result["blocks.0.*"]
    names = [name for group in result.values() for name in group]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_group_has_its_own_rate_and_decay_and_vectors_never_decay() -> None:
    config = AdamWConfig(
        lr=2.0,
        weight_decay=0.5,
        groups=(GroupConfig(match="blocks.*.hyena*", lr=0.5, weight_decay=0.25),),
    )
    for group in parameter_groups(tiny(), config):
        ours = group.match is not None
        assert group.lr == (0.5 if ours else 1.0)
        flat = all("norm" in name or "bias" in name for name in group.names)
        assert group.weight_decay in ({0.0} if flat else {0.0, 0.25 if ours else 0.5})
    rows = describe_groups(tiny(), config)
    assert {row["lr"] for row in rows} == {1.0, 2.0}
    assert {row["weight_decay"] for row in rows} == {0.0, 0.25, 0.5}
    assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in tiny().parameters())


def test_a_pattern_without_parameters_is_an_error_with_the_nearest_names() -> None:
    groups = (GroupConfig(match="blocks.*.hyna-se.qkv.weight"),)
    with pytest.raises(ConfigError, match=r"no parameter.*hyena-se\.qkv\.weight") as raised:
        parameter_groups(tiny(), AdamWConfig(groups=groups))
    assert "groups.0.match" in str(raised.value)
    shadowed = (GroupConfig(match="blocks.*"), GroupConfig(match="blocks.0.*"))
    with pytest.raises(ConfigError, match="only parameters of the groups before it"):
        parameter_groups(tiny(), AdamWConfig(groups=shadowed))


def test_parameters_with_different_states_are_in_different_groups() -> None:
    states = {group.states for group in parameter_groups(tiny(), MuonConfig())}
    assert states == {("momentum",), ("exp_avg", "exp_avg_sq")}


KINDS: dict[str, dict[str, object]] = {
    "attention": {"heads": 2, "qkv_bias": True, "qk_norm": True},
    "mamba1": {"heads": 2, "state_size": 4},
    "mamba2": {"state_size": 4, "head_dim": 8},
    "hyena-se": {"groups": 4},
    "hyena-mr": {"groups": 4, "taps": 5, "filter_horizon": 16},
    "hyena-li": {"state_size": 2, "poles": "complex"},
    "hyena-li-freeform": {"filter_horizon": 16},
    "hyena-li-s4d": {"state_size": 2},
    "hyena-li-factored": {"state_size": 2},
    "hyena-mlp": {"hidden": 24, "groups": 4},
    "mlp": {"hidden": 24, "bias": True},
    "glu": {"hidden": 24},
    "moe": {"experts": 2, "hidden": 8, "bias": True, "bias_update_rate": 0.1, "shared_hidden": 6},
    "mla": {
        "heads": 2,
        "q_lora_rank": 6,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
    },
    "delta": {"heads": 2, "key_head_dim": 8},
    "zamba-block": {"heads": 2, "hidden": 24, "lora_rank": 2},
}
CONSTANT = {
    "mamba1": {"dt_bias", "A_log", "D"},
    "moe": {"gate_up_bias", "down_bias"},
    "hyena-li": {"rates", "angles", "residues", "residues_i"},
    "hyena-li-s4d": {"rates", "angles", "inputs", "inputs_i", "residues", "residues_i"},
    "hyena-li-factored": {"steps", "poles", "residues"},
}
"""Parameters of two or more dimensions without weight decay."""


def model_of(kind: str, options: dict[str, Any]) -> Model:
    shared = kind == "zamba-block"
    second_operator = {"other": {"kind": "hyena-se", "groups": 4}} if shared else {}
    data = {
        "vocab_size": 11,
        "width": 16,
        "pattern": "[shared>other]" if shared else "[one/none]",
        "operators": {"shared" if shared else "one": {"kind": kind, **options}, **second_operator},
    }
    return Model(build_config(ModelConfig, data, source="a test"))


def test_each_rule_of_decay_has_a_function() -> None:
    assert set(get_args(DecayRule)) == NO_DECAY.keys()


def test_only_vectors_and_rates_of_operators_have_no_decay() -> None:
    assert KINDS.keys() == OPERATORS.keys()
    for kind, options in KINDS.items():
        model = model_of(kind, options)
        groups = parameter_groups(model, AdamWConfig(weight_decay=0.5))
        constant = {n for group in groups for n in group.names if group.weight_decay == 0}
        assert constant == NO_DECAY["headrace"](model)
        named = dict(model.named_parameters())
        assert constant >= {name for name, p in named.items() if p.ndim < 2}, kind
        several = {name.rpartition(".")[2] for name in constant if named[name].ndim > 1}
        assert several == CONSTANT.get(kind, set()), kind


SAVANNA = {
    "attention": {"qkv.bias", "q_norm.weight", "k_norm.weight"},
    "hyena-se": {"output.bias"},
    "hyena-mr": {"taps", "output.bias"},
    "hyena-li": {"output.bias"},
    "hyena-li-freeform": {"output.bias", *(f"layers.{n}.bias" for n in range(3))},
    "hyena-li-s4d": {"output.bias"},
    "hyena-li-factored": {"steps", "poles", "residues", "output.bias"},
    "hyena-mlp": set(),
    "mlp": {"up.bias", "down.bias"},
    "glu": set(),
}
"""Parameters without decay in Savanna: those of norms and of MR's filter, and those named bias."""


def spared(kind: str, rule: str) -> tuple[set[str], set[str]]:
    """Return the operator's parameters without weight decay, and the others."""
    model = model_of(kind, KINDS[kind])
    config = AdamWConfig(weight_decay=0.5, decay=rule)
    prefix = "blocks.0.mixer.operator."
    sides: tuple[set[str], set[str]] = (set(), set())
    for group in parameter_groups(model, config):
        ours = {n.removeprefix(prefix) for n in group.names if n.startswith(prefix)}
        sides[group.weight_decay > 0].update(ours)
    return sides


def test_savannas_rule_spares_the_taps_of_mr_and_decays_rates_residues_and_skip() -> None:
    for kind, expected in SAVANNA.items():
        assert spared(kind, "savanna")[0] == expected, kind
    assert {"rates", "angles", "residues", "skip"} <= spared("hyena-li", "savanna")[1]
    assert {"rates", "angles", "residues", "skip"} <= spared("hyena-li", "headrace")[0]
    assert "taps" in spared("hyena-mr", "headrace")[1]
    for kind in ("mamba1", "mamba2", "moe"):  # not in Savanna
        assert spared(kind, "savanna") == spared(kind, "headrace"), kind


def test_norms_never_decay_and_embeddings_do() -> None:
    for rule in NO_DECAY:
        names = NO_DECAY[rule](tiny())
        assert {n for n, _ in tiny().named_parameters() if "norm." in n} <= names
        assert "embedding.weight" not in names


def test_the_description_names_what_decays() -> None:
    sides: dict[bool, set[str]] = {True: set(), False: set()}
    for row in describe_groups(tiny(), AdamWConfig(decay="savanna")):
        sides[row["weight_decay"] > 0].update(row["names"])
    assert {"blocks.*.hyena-li.rates", "blocks.*.hyena-li.skip", "embedding.weight"} <= sides[True]
    assert {"blocks.*.hyena-mr.taps", "blocks.*.mixer.norm.weight"} <= sides[False]
    for name in sides[True] | sides[False]:  # each is a pattern that a group can match
        assert chosen(tiny(), GroupConfig(match=name))[name]
