from __future__ import annotations

from pathlib import Path

import pytest

from headrace.console import config as reader
from headrace.console.errors import ConfigError
from headrace.models.config.config import load_model_config
from headrace.trainer.engines import ENGINES
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.run import config
from headrace.trainer.run.layout_plan import model_hash


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("blok", r"recompute: `blok` is not one of .* did you mean `block`"),
        ("0", r"recompute must be above 0 and at most 1, not 0.0"),
        ("true", r"recompute: should be a number, not true or false"),
        ("{evry: 3}", r"1 problem .*\s+recompute.evry: unknown key; did you mean `every`"),
        ("{every: 0}", r"recompute: every must be at least 1, not 0"),
        ("{every: 1}", r"recompute: give `every` or `save`"),
        ("{save: [matmull]}", r"1 problem .*\s+recompute.save.0: `matmull` is not one of"),
        ("[none, blok]", r"1 problem .*\s+recompute.1: `blok` is not one of"),
    ],
)
def test_wrong_forms_of_recompute_are_named(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.build({}, [f"recompute={value}"], source="a test")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("scores.every=300", "scores.every=300 must be a multiple of checkpoints.every=200"),
        ("scores.every=0", "scores: every must be at least 1, not 0"),
        ("scores.ema=true", "scores.ema needs optimizer.ema"),
        ("scores.tasks=[]", "scores: tasks is empty"),
        ("scores.num_fewshot=-1", "scores: num_fewshot must be at least 0, not -1"),
    ],
)
def test_wrong_settings_of_scores_are_named(word: str, message: str) -> None:
    words = ["scores.tasks=[a]", "scores.every=400", "checkpoints.every=200"]
    assert config.load(None, words).scores is not None
    with pytest.raises(ConfigError, match=message):
        config.load(None, [*words, word])


def test_every_key_has_a_default() -> None:
    result = config.load(None)
    assert result.engine == DeepSpeedConfig(zero=1) and result.layout.tp == 1


def test_the_default_engine_needs_no_kind() -> None:
    assert config.load(None, ["engine.zero=3"]).engine == DeepSpeedConfig(zero=3)
    result = config.load(None, ["engine.kind=fsdp2", "engine.shard=4"])
    assert result.engine == Fsdp2Config(shard=4)


def test_every_engine_is_found_by_its_name() -> None:
    for name, kind in ENGINES.items():
        assert kind().kind == name
        assert config.load(None, [f"engine.kind={name}"]).engine == kind()


def test_a_written_configuration_is_read_back(tmp_path: Path) -> None:
    result = config.load(None, ["engine.zero=2", "optimizer.lr=1e-4", "init_from.path=runs/x"])
    (tmp_path / "run.yaml").write_text(reader.dump(result))
    assert config.load(tmp_path / "run.yaml") == result


def test_all_options_of_operators_define_a_run() -> None:
    def identity(*overrides: str) -> object:
        return config.model_identity(load_model_config("tiny-hybrid", overrides))["operators"]

    assert identity() == identity("operators.li.gamma_min=0.01")
    assert identity("operators.li.gamma_min=0.02") != identity()
    assert identity("operators.se.pregate=false") != identity()


def test_the_longest_context_of_exports_does_not_define_a_run() -> None:
    def identity(*words: str) -> object:
        words = tuple(f"operators.attention.rope.{word}" for word in words)
        return config.model_identity(load_model_config("tiny-transformer", words))

    assert identity("original_length=512") == identity()
    scaled = ("scaling=yarn", "factor=2")
    assert identity("original_length=512", *scaled) != identity(*scaled)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("engine.kind=megatron", "megatron"),
        ("engine.shards=2", "shards"),
        ("checkpoints.every=0", "every must be at least 1"),
        ("micro_batch_tokens=0", "micro_batch_tokens must be at least 1"),
        ("optimizer.lr=fast", "optimizer.lr"),
        ("synthetic.warmup=-1", "warmup must be at least 0"),
    ],
)
def test_a_wrong_value_is_named(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.load(None, [word])


@pytest.mark.parametrize("name", ["zero-bubble", "zb-h1", "zb_v", "ZBVZeroBubble", "dualpipe"])
def test_schedules_without_a_bubble_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, ["layout.pp=2", f"layout.schedule={name}"])
    said = str(caught.value)
    assert f"layout.schedule: `{name}` is a zero-bubble schedule" in said
    assert "wrong under FSDP2" in said and "use schedule=interleaved" in said


def test_an_unknown_schedule_is_not_a_refused_one() -> None:
    with pytest.raises(ConfigError, match=r"`1f2b` is not one of .*did you mean `1f1b`"):
        config.load(None, ["layout.pp=2", "layout.schedule=1f2b"])


def test_the_shipped_runs_load() -> None:
    folder = Path(config.__file__).parents[2] / "configs" / "runs"
    files = sorted(folder.glob("*.yaml"))
    assert files
    for file in files:
        config.load(file)


HASHES = {
    "blackmamba-1.5b": "2888e8091ff66352",
    "evo2-7b-8k": "7711a41e6c4680c0",
    "gpt2-small": "daf17b82451a5630",
    "hybrid-50m": "ec361d8c7bd30a21",
    "llama3-8b": "ac223b75d55d960a",
    "mamba-130m": "4071314629791c3d",
    "mamba2-130m": "2a03c82919ba8e7a",
    "stripedhyena-7b": "6951f49987a27f54",
    "tiny-moe": "498f323fb630f8c3",
    "zamba2-1.2b": "1d435b3f7f9b189e",
}
"""Hashes of before 1.0: runs and layout plans name them."""


def test_a_new_key_leaves_the_hashes_of_models() -> None:
    assert {name: model_hash(load_model_config(name)) for name in HASHES} == HASHES
