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
from small_data import random_documents, write_dataset

from headrace.console.errors import ConfigError, LayoutError, MisuseError
from headrace.dataplane.order.timeline import PhaseRows
from headrace.models.config import load_model_config
from headrace.trainer.cli import main
from headrace.trainer.costs.hardware import Hardware
from headrace.trainer.costs.planner.assemble import in_phase
from headrace.trainer.costs.planner.grid import Grid, Shape
from headrace.trainer.costs.planner.machine import Machine
from headrace.trainer.costs.planner.make import Question, drawn, make_plans
from headrace.trainer.costs.planner.search import search
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.shard_groups import LayerShards
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.run.config import RunConfig
from headrace.trainer.run.job import Job
from headrace.trainer.run.layout_plan import load_plan

TINY = str(Path(__file__).parent / "tiny.yaml")
RULES = ["none", "block", {"save": ["matmul"]}, "operator", "none"]
DENSE = ("--seq-len", "4096", "--batch-tokens", "1Mi", "--hardware", "h100")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A CPU with rates for plain torch."""
    row = {"source": "here"}
    file = tmp_path_factory.mktemp("hardware") / "cpu.yaml"
    directions = ("forward", "backward")
    figures = {
        "name": "cpu",
        "devices_per_node": 2,
        "sources": {"here": {"kind": "measured", "date": "2026-11-22", "text": "a test"}},
        "device": {"name": "cpu", "kind": "cpu", "memory": 1 << 30, **row},
        "reserved": {"bytes": 1, **row},
        "matmul": [{"m": 64, "k": 64, "n": 64, "precision": "fp32", "rate": 1e10, **row}],
        "memory": [{"bytes": 1 << 20, "rate": 1e10, **row}],
        "attention": [
            {"head_width": 18, "heads": 2, "length": 16, "precision": "fp32", "rate": 1e9,
             "direction": direction, **row}
            for direction in directions
        ],
        "links": {"node": {"bandwidth": 1e9, "latency": 1e-5, **row}},
    }  # fmt: skip
    file.write_text(json.dumps(figures))
    return str(file)


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
    job = ask("processes=2", "precision=fp32", layout=str(file))
    best = result["phases"][0]["best"]
    assert len(best) == 10
    assert [entry["seconds"] for entry in best] == sorted(entry["seconds"] for entry in best)
    assert (job.run.layout.pp, job.run.layout.tp) == (best[0]["pp"], best[0]["tp"])
    assert job.run.engine.kind == best[0]["engine"]
    predicted = result["plan"]["predicted"]
    assert sum(predicted["by"].values()) == pytest.approx(predicted["seconds"])
    assert sum(predicted["memory_by"].values()) == predicted["memory"]
    assert "tokens/s on each device" in plan("show", str(file)).stderr


def question(machine: str, *lengths: int, **more: Any) -> Question:
    """A question about phases of 64 tokens a step."""
    phases = [
        PhaseRows(
            name=f"of{length}", first_row=0, first_step=0, first_token=0,
            rows=64 // length, seq_len=length, batch_rows=64 // length,
        )
        for length in lengths
    ]  # fmt: skip
    return Question(
        model=load_model_config(TINY),
        run=replace(RunConfig(), precision="fp32"),
        hardware=Hardware.load(machine),
        gpus=2,
        phases=phases,
        **more,
    )


def test_one_plan_serves_all_phases(machine: str) -> None:
    plans = make_plans(question(machine, 16, 32, 16))
    assert [own.costs.phase.name for own in plans.phases] == ["of16", "of32"]
    assert plans.phases[0].costs.phase.rows == 8  # those of both phases of 16 tokens
    assert plans.best is not None
    seconds = {phase.name: phase.seconds for phase in plans.best.planned.phases}
    for own, each in zip(plans.phases, plans.each, strict=True):
        name = own.costs.phase.name
        assert seconds[name] >= each.predicted.seconds * (1 - 1e-9)
    assert len(plans.best.planned.phases) == 2
    for own, made in zip(plans.phases, plans.in_phases, strict=True):
        assert made.plan.price == seconds[own.costs.phase.name]


def test_the_plan_of_all_phases_is_drawn_where_it_is_not_the_best_of_the_phase(
    machine: str,
) -> None:
    plans = make_plans(question(machine, 16, 32))
    [one, two] = [in_phase(own.best) for own in plans.phases]
    other = in_phase(plans.phases[0].outcome.candidates[1])
    titles = [title for title, *_ in drawn(replace(plans, in_phases=[one, two]), [], None)]
    assert titles == ["phase of16", "phase of32"]
    explained = list(zip(plans.phases, (own.best for own in plans.phases), strict=True))
    found = drawn(replace(plans, in_phases=[other, two]), explained[:1], "tp=1")
    assert [title for title, *_ in found] == [
        *titles, "phase of16 with the plan of all phases", "phase of16 with tp=1",
    ]  # fmt: skip
    assert found[2][2] is other


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
    assert [each["phase"] for each in result["phases"]] == ["a", "b", "d"]
    planned = {(each["seq_len"], each["batch_tokens"]) for each in
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
    assert "has no collectives" in text
    assert "links.node" in text
    assert "profile --links" in text
    batch = ("--seq-len", "16", "--batch-tokens", "64", "--gpus", "1")
    plan("--model", TINY, *batch, "--hardware", str(file))


def test_reshard_of_a_layer_is_a_choice_of_fsdp2_by_block_alone(machine: str) -> None:
    [own] = make_plans(question(machine, 16)).phases
    costs = own.costs
    layout = LayoutConfig()
    grids = [
        Grid(Shape(layout, 2, 1, 2), engine, layout)
        for engine in (Fsdp2Config(gather="block"), Fsdp2Config(gather="step"), DeepSpeedConfig())
    ]
    for grid in grids:
        problem = costs.problem(grid, 1e9, all_choices=True)
        [first, *_] = problem.sorts
        by = {(c.name.rule, c.name.reshard): c for c in first.choices}
        block = grid.engine == Fsdp2Config(gather="block")
        assert (("none", False) in by) == block
        if block:
            gathered = by["none", False]
            assert gathered.backward <= by["none", None].backward
            assert gathered.held > by["none", None].held


def test_tensor_ranks_as_context_ranks_are_simulated(machine: str) -> None:
    """Such a layer gathers whole weights, and its messages are those of a context axis."""
    [own] = make_plans(question(machine, 16)).phases
    layout = LayoutConfig(tp=2)
    grid = Grid(Shape(layout, 1, 2, 2), Fsdp2Config(), layout)
    problem = own.costs.problem(grid, 1e9, simulate=True, all_choices=True)
    plain = own.costs.problem(grid, 1e9, all_choices=True)
    for sort, without in zip(problem.sorts, plain.sorts, strict=True):
        by = {c.name.key: c for c in sort.choices}
        rank, whole = by["none", None, False], by["none", None, True]
        assert "context" in whole.name.forward or "tensor" not in whole.name.forward
        assert "tensor" in rank.name.forward
        assert whole.work > 1.5 * rank.work  # weights and gradients of all tensor ranks
        assert sort.forward <= without.forward
        same = next(c for c in without.choices if c.name.key == rank.name.key)
        own = sort.forward + rank.backward + sort.update / 2  # two micro-batches
        assert own == pytest.approx(without.forward + same.backward + without.update / 2)


def test_a_layout_that_is_not_best_is_explained(machine: str, searched: tuple[Path, Any]) -> None:
    text = searched[1].stderr
    assert "pp=2 in phase steps:" in text
    assert " of the best (+" in text
    refused = small(machine, "--explain", "tp=3").stderr
    assert "no layout of 2 devices with tp=3 can run this model" in refused
    assert "pp, tp, cp and ep divide 2 devices, tp at most 2 (a node)" in refused


def test_reasons_of_layouts_that_were_not_asked_for_are_not_listed(machine: str) -> None:
    asks = question(machine, 16)
    node = Hardware(replace(asks.hardware.file, devices_per_node=4), "node.yaml")
    costs = asks.costs(Machine(node, "fp32"), asks.phases[0])
    every = " ".join(search(costs, 4, 1e9, best=1).refused)
    assert "cp=4" in every and "cp=2" in every
    asked = search(costs, 4, 1e9, wanted={"cp": 4, "attention": "a2a"})
    assert asked.refused and all("cp=4" in reason for reason in asked.refused)
    assert not asked.candidates


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
    words = ("--model", "llama2-7b", *DENSE, "--gpus", "2", "--memory", "0.05")
    text = plan(*words, code=1).stderr
    assert "no layout fits into 4.0" in text.replace("4.08", "4.0")
    assert "the nearest needs" in text
    assert "too much: pp 1 × dp 1 × cp 1 × tp 2" in text
    assert "state " in text
    assert "not decided" not in text


def test_a_kernel_without_a_rate_is_an_error_that_names_the_command() -> None:
    words = ("--model", "mamba2-130m", *DENSE, "--gpus", "2")
    text = plan(*words, code=1).stderr
    assert "has no rate of short_convolution" in text or "has no rate of ssd" in text
    assert "trainer profile" in text
    assert "ssd: no measured rate" in plan(*words, "--roofline").stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "missing --model or --module, --hardware, --gpus"),
        (("--model", TINY, "--hardware", "h100", "--gpus", "2"), "give --mixture, or --seq-len"),
        (("--model", TINY, *DENSE[:1], "3", *DENSE[2:], "--gpus", "2"), "is not a multiple of"),
        (("--model", TINY, *DENSE, "--gpus", "2", "--explain", "zz=1"), "`zz=1` is not SETTING"),
    ],
)
def test_wrong_words_are_misuse(words: tuple[str, ...], message: str) -> None:
    assert message in plan(*words, code=2).stderr
