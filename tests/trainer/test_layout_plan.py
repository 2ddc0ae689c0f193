"""`trainer plan`, and `trainer run --layout` with the file that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from formats.samples import pin_keys
from support.configs import CONFIGS
from support.data.small_data import random_documents, write_dataset
from support.planner.hardware import cpu_hardware

from headrace.console.errors import ConfigError, LayoutError, MisuseError
from headrace.console.progress import format_bytes, format_seconds
from headrace.models.config.config import load_model_config
from headrace.planner.hardware import Hardware
from headrace.planner.prices.layers import Costs
from headrace.planner.prices.machine import Machine
from headrace.planner.search.make import parse_settings, uniform_phase
from headrace.planner.search.refused import explain_refusal
from headrace.planner.search.search import search
from headrace.trainer.cli import main
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.shard_groups import LayerShards
from headrace.trainer.run.config import RunConfig
from headrace.trainer.run.job import Job
from headrace.trainer.run.layout_plan import load_plan

TINY = str(CONFIGS / "tiny.yaml")
RULES = ["none", "block", {"save": ["matmul"]}, "operator", "none"]
DENSE = ("--seq-len", "4096", "--batch-tokens", "1Mi", "--hardware", "h100")
ASKED = ("--model", TINY, *DENSE, "--gpus", "2")
SHORT = ("--seq-len", "1024", "--batch-tokens", "4Ki", "--hardware", "h100", "--roofline")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cpu_hardware(tmp_path_factory.mktemp("hardware"))


def plan(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["plan", *words])
    assert result.exit_code == code, result.output
    return result


def small(machine: str, *words: str, code: int = 0) -> Result:
    batch = ("--seq-len", "16", "--batch-tokens", "64", "--gpus", "2")
    return plan("--model", TINY, *batch, "--hardware", machine, *words, code=code)


@pytest.fixture(scope="module")
def searched(machine: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A plan of two ranks, and what the command prints."""
    file = tmp_path_factory.mktemp("plan") / "plan.yaml"
    words = ("--out", str(file), "--json", "--explain", "pp=2")
    return file, small(machine, *words)


@pytest.fixture(scope="module")
def bf16() -> Costs:
    """Costs of steps of eight rows in bf16."""
    machine = Machine(Hardware.load("h100"), "bf16", roofline=True)
    run = replace(RunConfig(), precision="bf16")
    return Costs(load_model_config(TINY), run, machine, uniform_phase(16, 8))


@pytest.fixture
def planned(searched: tuple[Path, Any], tmp_path: Path) -> Path:
    """The plan with a different rule for each layer."""
    file = tmp_path / "plan.yaml"
    stored = yaml.safe_load(searched[0].read_text())
    stored["engine"] = {"kind": "fsdp2"}
    stored["micro_batch_tokens"] = 16
    stored["layout"] = {}
    stored["layers"] = [
        {"layers": [number, number], "recompute": rule, "reshard": number != 1 and None}
        for number, rule in enumerate(RULES)
    ]
    file.write_text(yaml.safe_dump(stored))
    return file


def test_a_plan_is_what_a_run_resolves_to(
    searched: tuple[Path, Any], ask: Callable[..., Job]
) -> None:
    """The keys of the file stand in the run, and the prediction has its parts."""
    file, printed = searched
    result = json.loads(printed.stdout)
    pin_keys("plan", result)
    job = ask("processes=2", "precision=fp32", layout=str(file))
    best = result["phases"][0]["best"]
    assert len(best) == 10
    assert [entry["seconds"] for entry in best] == sorted(entry["seconds"] for entry in best)
    assert (job.run.layout.pp, job.run.layout.tp) == (best[0]["pp"], best[0]["tp"])
    assert job.run.engine.kind == best[0]["engine"]
    predicted = result["plan"]["predicted"]
    assert sum(predicted["by"].values()) == pytest.approx(predicted["seconds"])
    assert sum(predicted["memory_by"].values()) == predicted["memory"]
    page = file.with_suffix(".html")
    words = ("--model", TINY, "--device", "cpu", "--html", str(page))
    assert "tokens/s on each device" in plan("show", str(file), *words).stderr
    drawn = page.read_text()
    assert format_bytes(predicted["memory"]) in drawn
    assert all(f"> {name}<" in drawn or f">{name}<" in drawn for name in predicted["memory_by"])
    assert "need each other" in plan("show", str(file), "--html", str(page), code=2).stderr
    refused = plan("show", str(file), "--model", "llama2-7b", "--html", str(page), code=1)
    assert "the plan is for model" in refused.stderr


@pytest.mark.long
def test_phases_of_a_mixture_are_planned(machine: str, tmp_path: Path) -> None:
    """Through the command: two lengths and three batches, of which two are alike."""
    write_dataset(str(tmp_path / "data"), random_documents(1, 60))
    batches = {"a": (16, 64), "b": (16, 128), "c": (16, 64), "d": (32, 64)}
    phases = {
        name: {"tokens": 256, "seq_len": length, "batch": batch, "weights": {"web": 1}}
        for name, (length, batch) in batches.items()
    }
    phases["a"]["lr"] = {"warmup": 64}
    mixture = {"sources": {"web": {"data": str(tmp_path / "data")}}, "phases": phases}
    file, out = tmp_path / "mixture.yaml", tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(mixture))
    words = ("--model", TINY, "--mixture", str(file), "--hardware", machine, "--gpus", "2")
    printed = plan(*words, "--out", str(out), "--json", "--explain", "zero=3")
    result = json.loads(printed.stdout)
    assert [item["phase"] for item in result["phases"]] == ["a", "b", "d"]
    planned = {(item["seq_len"], item["batch_tokens"]) for item in
               result["plan"]["planned"]["phases"]}  # fmt: skip
    assert planned == set(batches.values())
    assert load_plan(out).planned.gpus == 2
    for name in ("a", "b", "d"):
        assert f"zero=3 in phase {name}:" in printed.stderr


def test_a_missing_link_is_named_with_the_command(machine: str, tmp_path: Path) -> None:
    """A plan of one device needs no link."""
    figures = yaml.safe_load(Path(machine).read_text())
    del figures["links"]
    file = tmp_path / "cpu.yaml"
    file.write_text(yaml.safe_dump(figures))
    text = small(str(file), code=1).stderr
    assert "has no links.node for 2 devices" in text
    assert "profile --links" in text
    batch = ("--seq-len", "16", "--batch-tokens", "64", "--gpus", "1")
    plan("--model", TINY, *batch, "--hardware", str(file))


def test_a_layout_that_is_not_best_is_explained(machine: str, searched: tuple[Path, Any]) -> None:
    text = searched[1].stderr
    assert "pp=2 in phase steps:" in text
    assert " of the best (+" in text
    [entry] = json.loads(searched[1].stdout)["explained"]
    assert entry["asked"] == {"pp": 2} and entry["layout"]["pp"] == 2
    line = text.splitlines()[text.splitlines().index("pp=2 in phase steps:") + 1]
    assert line.startswith("pp 2 × dp 1, ") and " against the best, dp " in line
    shown = " against ".join(format_seconds(entry[key]) for key in ("seconds", "best_seconds"))
    assert shown in text
    change = sum(entry["by"].values()) - sum(entry["best_by"].values())
    assert change == pytest.approx(entry["seconds"] - entry["best_seconds"])
    assert sum(entry["memory_by"].values()) == entry["memory"]
    printed = small(machine, "--explain", "tp=3", "--json")
    refused = printed.stderr
    [entry] = json.loads(printed.stdout)["explained"]
    assert entry["error"] in refused and "layout" not in entry
    assert "no layout of 2 devices with tp=3 can run this model" in refused
    assert "tp=3 does not divide 2 devices" in refused


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("engine=deepspeed,zero=0", "DeepSpeed without ZeRO (engine.zero=0) sums bf16 gradients"),
        ("dp=2,tp=2", "dp=2 × tp=2 = 4 does not divide 2 devices"),
        (
            "pp=1,dp=1,cp=1,tp=1",
            "pp=1 × dp=1 × cp=1 × tp=1 = 1 leaves devices without work: there are 2",
        ),
        ("pp=two", "pp=two: a degree is a number of at least 1"),
        ("ep=2", "ep=2 splits experts, and the model has none"),
        ("pp=2,zero=3", "zero=3: layouts with pp=2 have no such setting"),
        ("zero=7", "zero=7: layouts of 2 devices have 1, 2, 3"),
        ("engine=fsdp2,zero=1", "zero=1: layouts with engine=fsdp2 have no such setting"),
        ("cp=1,attention=ring", "attention=ring: layouts with cp=1 have a2a"),
        ("rows=3", "rows=3: layouts of 2 devices have 1, 2, 4"),
    ],
)
def test_the_condition_that_an_explained_layout_breaks_is_named(
    bf16: Costs, asked: str, reason: str
) -> None:
    expected = parse_settings(asked)
    outcome = search(bf16, 2, 1e9, settings=expected, num_best=1)
    assert not outcome.grids
    assert any(reason in item for item in explain_refusal(bf16, 2, outcome, expected))


def test_what_an_engine_refuses_is_named(bf16: Costs) -> None:
    expected = parse_settings("pp=2,dp=2,zero=3")
    outcome = search(bf16, 4, 1e9, settings=expected, num_best=1)
    [reason] = explain_refusal(bf16, 4, outcome, expected)
    assert "needs the same modules on every rank" in reason


def test_a_plan_for_another_run_is_refused_with_every_difference(
    planned: Path, ask: Callable[..., Job]
) -> None:
    with pytest.raises(LayoutError) as error:
        ask("processes=1", "synthetic.batch_rows=8", layout=str(planned), model="tiny-hybrid")
    text = str(error.value)
    assert "model: the plan has" in text
    assert "processes: the plan has 2, the run 1" in text
    assert "16 tokens a row × 128 a step, and the plan has 16 × 64" in text
    assert "trainer plan" in text


def test_a_plan_for_another_precision_optimizer_or_device_is_refused(
    planned: Path, ask: Callable[..., Job]
) -> None:
    """Its seconds and bytes are those of another run. Older plans do not say for which run."""
    changes = ["processes=2", "precision=bf16", "optimizer.kind=muon"]
    with pytest.raises(LayoutError) as error:
        ask(*changes, layout=str(planned))
    text = str(error.value)
    assert "precision: the plan has fp32, the run bf16" in text
    assert "optimizer: the plan has adamw, the run muon" in text
    stored = yaml.safe_load(planned.read_text())
    stored["planned"]["device"] = "cuda"
    planned.write_text(yaml.safe_dump(stored))
    with pytest.raises(LayoutError, match="device: the plan has cuda, the run cpu"):
        ask("processes=2", layout=str(planned))
    for name in ("precision", "optimizer", "device"):
        del stored["planned"][name]
    planned.write_text(yaml.safe_dump(stored))
    ask(*changes, layout=str(planned))


def test_a_micro_batch_of_a_part_of_a_row_is_refused(
    planned: Path, ask: Callable[..., Job]
) -> None:
    stored = yaml.safe_load(planned.read_text())
    stored["micro_batch_tokens"] = 15
    planned.write_text(yaml.safe_dump(stored))
    with pytest.raises(ConfigError, match=r"micro_batch_tokens: 15 must be a multiple of 16"):
        ask("processes=2", layout=str(planned))


def test_an_override_of_a_planned_key_is_refused(planned: Path, ask: Callable[..., Job]) -> None:
    with pytest.raises(MisuseError, match=r"recompute=block"):
        ask("processes=2", "recompute=block", layout=str(planned))


def test_a_simulated_plan_is_refused_by_name(planned: Path, ask: Callable[..., Job]) -> None:
    stored = yaml.safe_load(planned.read_text())
    stored["planned"]["executable"] = False
    stored["layers"][1]["sequence"] = True
    planned.write_text(yaml.safe_dump(stored))
    with pytest.raises(LayoutError, match=r"`sequence`, layers 1–1"):
        ask("processes=2", layout=str(planned))


def test_choices_of_the_layers_become_keys_of_the_engine(
    planned: Path, ask: Callable[..., Job]
) -> None:
    stored = yaml.safe_load(planned.read_text())
    stored["layers"][3]["shard"] = 1
    planned.write_text(yaml.safe_dump(stored))
    engine = ask("processes=2", layout=str(planned)).run.engine
    assert isinstance(engine, Fsdp2Config)
    assert engine.layers == (
        LayerShards(layers=(1, 1), reshard=False),
        LayerShards(layers=(3, 3), shard=1),
    )
    stored["engine"]["layers"] = [{"layers": [0, 0], "shard": 1}]
    planned.write_text(yaml.safe_dump(stored))
    with pytest.raises(LayoutError, match=r"both engine\.layers and `layers`"):
        ask("processes=2", layout=str(planned))
    stored["engine"] = {"kind": "deepspeed"}
    planned.write_text(yaml.safe_dump(stored))
    with pytest.raises(LayoutError, match=r"which engine\.kind=deepspeed does not have"):
        ask("processes=2", layout=str(planned))


def test_a_damaged_plan_names_the_key(planned: Path, ask: Callable[..., Job]) -> None:
    planned.write_text(planned.read_text().replace("executable", "executible"))
    with pytest.raises(ConfigError, match=r"planned\.executible"):
        ask("processes=2", layout=str(planned))


@pytest.mark.parametrize(
    ("spans", "number", "message"),
    [
        ([[3, 4], [0, 2]], 0, "[3, 4] leaves out layers: it must begin with layer 0"),
        ([[3, 4], [0, 2]], 1, "[0, 2] after [3, 4] repeats or reorders layers"),
        ([[0, 2], [2, 4]], 1, "[2, 4] after [0, 2] repeats or reorders layers: it must begin with"),
        ([[0, 1], [3, 4]], 1, "[3, 4] after [0, 1] leaves out layers: it must begin with layer 2"),
        ([[0, 1], [2, 3]], 1, "[2, 3] must end with layer 4, the model's last"),
        ([[0, 1], [2, 5]], 1, "[2, 5] must end with layer 4, the model's last"),
        ([[0, 1], [4, 2]], 1, "first and last layer, not [4, 2]"),
    ],
)
def test_a_span_of_wrong_layers_is_named_with_its_line(
    planned: Path, ask: Callable[..., Job], spans: list[list[int]], number: int, message: str
) -> None:
    stored = yaml.safe_load(planned.read_text())
    stored["layers"] = [{"layers": span, "recompute": "none"} for span in spans]
    planned.write_text(yaml.safe_dump(stored))
    with pytest.raises(ConfigError) as error:
        ask("processes=2", layout=str(planned))
    text = planned.read_text().splitlines()
    lines = [n for n, line in enumerate(text, start=1) if line == "- layers:"]
    assert f"line {lines[number]}: layers.{number}.layers: {message}" in str(error.value)


def test_a_plan_without_layers_is_refused(planned: Path) -> None:
    stored = yaml.safe_load(planned.read_text())
    planned.write_text(yaml.safe_dump(stored | {"layers": []}))
    with pytest.raises(ConfigError, match="layers: needs a span"):
        load_plan(planned)


@pytest.mark.long
def test_a_planned_run_equals_the_same_options_to_the_bit(
    planned: Path, trainer: Any, trainer_in: Any, tmp_path: Path
) -> None:
    words = ("--processes", "2")
    trainer.out = tmp_path / "planned"
    command = [word for word in trainer.command(*words) if word != "engine.kind=fsdp2"]
    trainer.command = lambda *words, out=None: [*command, *words]
    trainer.run("--layout", str(planned))
    flags = trainer_in(tmp_path)  # without the plan's `reshard`
    text = "recompute=[none, block, {save: [matmul]}, operator, none]"
    flags.run(*words, "micro_batch_tokens=16", text)
    assert trainer.losses() == flags.losses()
    stored = yaml.safe_load((trainer.out / "run.yaml").read_text())
    assert stored["recompute"][1] == "block"
    assert stored["engine"]["layers"] == [{"layers": [1, 1], "reshard": False, "shard": None}]


def test_no_plan_names_what_the_nearest_layout_needs() -> None:
    words = ("--model", "llama2-7b", *DENSE, "--gpus", "2", "--memory", "0.001")
    text = plan(*words, code=1).stderr
    assert "no layout fits into 81.5 MB" in text
    assert "the nearest needs" in text
    assert "too much: dp 1 × tp 2" in text
    assert "; in host memory optimizer " in text
    assert "the state alone exceeds it in each of them" in text


@pytest.mark.slow
def test_no_plan_counts_the_layouts_whose_state_alone_fits() -> None:
    words = ("--model", "tiny-transformer", *SHORT, "--gpus", "2", "--memory", "0.00005")
    text = plan(*words, code=1).stderr
    assert "of them, and in " in text
    assert "the nearest needs" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "missing --model or --module, --hardware, --gpus"),
        (("--model", TINY, "--hardware", "h100", "--gpus", "2"), "give --mixture, or --seq-len"),
        (("--model", TINY, *DENSE[:1], "3", *DENSE[2:], "--gpus", "2"), "is not a multiple of"),
        ((*ASKED, "--explain", "zz"), "`zz` is not SETTING=VALUE"),
        ((*ASKED, "--explain", "zz=1"), "there is no setting `zz`"),
        ((*ASKED, "--explain", "schedule=zb-h1"), "`zb-h1` is a zero-bubble schedule"),
        ((*ASKED, "--explain", "engine=fsdp3"), "no engine `fsdp3`; did you mean `fsdp2`?"),
        ((*ASKED, "--out", "/nowhere/plan.yaml"), "the folder of /nowhere/plan.yaml does not"),
        ((*ASKED, "--html", "/nowhere/page.html"), "the folder of /nowhere/page.html does not"),
        ((*ASKED, "--out", "/tmp"), "/tmp is a folder"),
    ],
)
def test_wrong_words_are_misuse(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found before the search."""
    monkeypatch.setattr("headrace.planner.search.make.make_plans", None)
    assert message in plan(*words, code=2).stderr
