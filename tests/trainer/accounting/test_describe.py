"""The description of a run before it starts."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.console.progress import format_bytes
from headrace.models.accounting.count import build_meta
from headrace.models.accounting.state import device_bytes
from headrace.models.config.options.precision import PRECISIONS
from headrace.trainer.accounting import describe
from headrace.trainer.accounting.memory import timelines
from headrace.trainer.engines.deepspeed import LARGEST_BUCKET


def test_the_description_adds_up(ask: Any) -> None:
    result = ask("processes=2", "micro_batch_tokens=16", "checkpoints.every=4", "engine.zero=1")
    about = describe.describe(result)
    (phase,) = about["batch"]
    assert (phase["micro_batches"], phase["micro_batch_rows"]) == (2, 1)
    count = about["model"]["parameters"]
    assert about["memory"] == {
        "weights": 4 * count,
        "gradients": 4 * count,
        "masters": 4 * -(-count // 2),
        "optimizer": 8 * -(-count // 2),
        "buffers": 4 * min(-(-count // 256) * 256, LARGEST_BUCKET["cpu"]),
    }
    assert about["checkpoints"] == {"bytes": 12 * count, "saved": 2}
    more = describe.describe(result, activations=True)
    assert more["memory"]["activations"] > 0
    assert "activations" in "\n".join(describe.lines(more))
    assert "  checkpoints:\n    every: 4\n" in describe.configuration(more)
    written = "\n".join(describe.lines(about))
    assert "dp 2 × tp 1 × cp 1" in written
    assert "2 of 1.49 GB each" in "\n".join(
        describe.lines({**about, "checkpoints": {"bytes": 1_490_000_000, "saved": 2}})
    )


def test_a_model_that_couples_the_rows_of_a_micro_batch_is_named(ask: Any) -> None:
    over = "model.operators.moe.balance_over="
    for value, shown in (("row", False), ("micro-batch", True)):
        about = describe.describe(ask(over + value, model="tiny-moe"))
        assert about["model"]["couples_rows"] == ["moe"] * shown
        line = (
            "moe balances over a micro-batch: micro_batch_tokens, layout.cp and dp define the run"
        )
        assert (line in "\n".join(describe.lines(about))) == shown


def test_active_parameters_are_named_where_a_token_does_not_use_all(ask: Any) -> None:
    about = describe.describe(ask(model="tiny-moe"))
    model = about["model"]
    unused = 4 * 3 * (3 * 192 * 128)  # four layers use one of four experts
    assert model["active_parameters"] == model["parameters"] - unused
    assert f"{model['parameters']:,} parameters (" in "\n".join(describe.lines(about))
    assert " active)" not in "\n".join(describe.lines(describe.describe(ask())))


def test_a_kind_of_layer_has_a_letter_of_its_own(ask: Any) -> None:
    assert describe.stripe(ask(model="tiny-hybrid")) == "[SMLAT]"


def test_memory_is_shown_by_tensor_rank_where_ranks_differ(ask: Any) -> None:
    """An odd vocabulary: the last of two ranks has one row more."""
    result = ask("processes=2", "layout.tp=2", "model.vocab_size=37", "engine.kind=fsdp2")
    about = describe.describe(result)
    first, last = about["memory_by_tensor_rank"]
    assert last["weights"] > first["weights"] and about["memory"] == last
    written = "\n".join(describe.lines(about))
    assert "each rank of tensor rank 0 (" in written and "of tensor rank 1 (" in written


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_copy_of_weights_that_scores_need_is_counted(ask: Any, device: str) -> None:
    words = ("scores.tasks=[mine]", "checkpoints.every=500", f"device={device}")
    about = describe.describe(ask(*words, dry_run=True))
    model = build_meta(ask().model)
    number = sum(parameter.numel() for parameter in model.parameters())
    fp32 = model.full_precision(PRECISIONS["bf16"])
    halves = sum(
        parameter.numel() for name, parameter in model.named_parameters() if name not in fp32
    )
    weights = 4 * number - (2 * halves if device == "cuda" else 0)
    scoring = about["scoring"]["memory"]
    (training,) = about["memory_by_tensor_rank"]
    assert scoring["whole weights"] == weights and scoring["state"] == device_bytes(training)
    (line,) = (line for line in describe.lines(about) if line.startswith("scores "))
    assert "whole weights" in line and ("loading" in line) == (device == "cuda")
    assert "; tasks that generate hold " in line
    assert describe.describe(ask())["scoring"] is None


@pytest.mark.slow  # traces the model for training, and for two sizes of scoring
def test_the_total_is_the_highest_of_training_and_scoring(ask: Any) -> None:
    words = ["scores.tasks=[mine]", "checkpoints.every=500", "model.vocab_size=64"]
    words += ["synthetic.batch_rows=256", "micro_batch_tokens=4096"]
    few, many = (
        describe.describe(
            ask(*words, f"scores.batch_tokens={tokens}", model="tiny-transformer"),
            activations=True,
        )
        for tokens in (16, 2**22)
    )
    for about, more, when in ((few, "memory_by_tensor_rank", "trains"), (many, None, "scores")):
        (training,) = about["memory_by_tensor_rank"]
        highest = training if more else about["scoring"]["memory"]
        assert about["memory"] == highest
        (line,) = (line for line in describe.lines(about) if line.startswith("memory "))
        assert f"when a rank {when}" in line and format_bytes(device_bytes(highest)) in line
        assert sum(line.startswith("training ") for line in describe.lines(about)) == 1


def test_split_experts_are_named(ask: Any) -> None:
    split = ("processes=4", "layout.ep=2", "engine.kind=fsdp2")
    written = "\n".join(describe.lines(describe.describe(ask(*split, model="tiny-moe"))))
    assert "pp 1 × dp 4 × tp 1 × cp 1, ep 2, fp32" in written
    assert "moe: 2 of 4 on each rank, 2 replicas of each expert" in written
    plain = "\n".join(describe.lines(describe.describe(ask("processes=4", model="tiny-moe"))))
    assert "experts " not in plain and ", ep" not in plain


def test_parameter_groups_and_the_optimizers_states_are_counted(ask: Any) -> None:
    groups = "optimizer.groups=[{match: 'blocks.*.hyena*', lr: 0.5, weight_decay: 0}]"
    about = describe.describe(ask(groups))
    written = "\n".join(describe.lines(about))
    assert "blocks.*.hyena*: " in written and "peak rate 0.00015, decay 0, exp_avg" in written
    plain = describe.describe(ask())
    assert "group " not in "\n".join(describe.lines(plain))
    assert "decay        0.1: " in written and "blocks.*.hyena-mr.taps" in written
    savanna = "\n".join(describe.lines(describe.describe(ask("optimizer.decay=savanna"))))
    (spared,) = [line for line in savanna.splitlines() if line.startswith("decay        none: ")]
    assert "blocks.*.hyena-mr.taps" in spared and "hyena-li.rates" not in spared
    muon = describe.describe(ask("optimizer.kind=muon"))
    matrices = sum(g["parameters"] for g in muon["groups"] if g["states"] == ["momentum"])
    saved = plain["memory"]["optimizer"] - muon["memory"]["optimizer"]
    assert 0 < saved == 4 * matrices
    assert plain["checkpoints"]["bytes"] - muon["checkpoints"]["bytes"] == 4 * matrices


def test_the_memory_of_a_stage_follows_its_schedule(ask: Any) -> None:
    words = ["processes=2", "layout.pp=2", "layout.cuts=[3]", "micro_batch_tokens=16"]
    first, last = (timelines(ask(*words), stage)[0].moments for stage in (0, 1))
    assert {moment.layer for moment in first} == {None, 0, 1, 2}
    assert {moment.layer for moment in last} == {None, 3, 4}
    assert "forward loss" in {moment.name for moment in last} - {moment.name for moment in first}
    kept = [moment.end["activations"] for moment in first if moment.name.startswith("forward")]
    assert max(kept) == pytest.approx(2 * kept[3], rel=0.01), "stage 0 keeps two graphs"


def test_stages_are_described(ask: Any) -> None:
    words = ["processes=2", "layout.pp=2", "layout.cuts=[3]", "micro_batch_tokens=16"]
    about = describe.describe(ask(*words), activations=True)
    whole = describe.describe(ask("processes=1", "micro_batch_tokens=16"), activations=True)
    first, last = about["stages"]
    assert (first["layers"], last["layers"]) == ([[0, 2]], [[3, 4]])
    embedding = 37 * 36  # tied: both stages hold it
    parameters = first["parameters"] + last["parameters"]
    assert parameters == whole["model"]["parameters"] + embedding
    assert first["memory"]["activations"] > 0 and last["memory"]["activations"] > 0
    (phase,) = about["pipeline"]
    assert (phase["messages"], phase["message_bytes"]) == (2 * 4, 2 * 4 * 16 * 36 * 4)
    assert 0 < phase["bubble"] < 1
    written = "\n".join(describe.lines(about))
    for part in ("stage 0      layers 0–2: ", "pp 2 × dp 1", "of a step idle; 8 messages, "):
        assert part in written, part
    assert "warning" not in written
    few = describe.describe(ask("processes=2", "layout.pp=2", "micro_batch_tokens=32"))
    assert "2 micro-batches in a step, fewer than 2 for each of the 2 stages" in few["warnings"][0]
    assert "warning      phase" in "\n".join(describe.lines(few))
