from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import CONFIGS
from support.data.small_data import plan_of, random_documents, write_dataset
from torch.nn.functional import cross_entropy

from headrace.console.errors import PlanError
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.order.plan import Plan
from headrace.models.accounting.count import build_meta
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.trainer.engines.engine import load_weights
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.loop.config import EvaluateConfig, held_out_digest
from headrace.trainer.loop.evaluate import Evaluator
from headrace.trainer.loop.evaluate import plan_held_out as held_out_plan

TINY = CONFIGS / "tiny.yaml"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    for number, name in enumerate(("web", "code")):
        for split, count in (("train", 60), ("val", 4 + 20 * number)):
            url = str(tmp_path / name / split)
            write_dataset(url, random_documents(10 * number + count, count, longest=60))
    return plan_of(
        {
            "sources": {n: {"data": str(tmp_path / n / "train")} for n in ("web", "code")},
            "phases": {
                "one": {
                    "tokens": 1024,
                    "seq_len": 16,
                    "batch": 64,
                    "weights": {"web": 0.5, "code": 0.5},
                }
            },
        }
    )


def test_held_out_rows_are_the_same_each_time(plan: Plan) -> None:
    result = held_out_plan(EvaluateConfig(rows=8), plan)
    assert result.hash == held_out_plan(EvaluateConfig(rows=8), plan).hash
    assert [source.url.rsplit("/", 1)[1] for source in result.sources] == ["val", "val"]
    tokens = [source.order.tokens for source in result.sources]
    rows = [phase.rows for phase in result.phases]
    assert rows == [min(8, (token - 1) // 16) for token in tokens]
    assert all(phase.steps == 1 and phase.seq_len == 16 for phase in result.phases)


def test_evaluation_loss_equals_plain_torch_by_source(plan: Plan, parallel: Parallel) -> None:
    """Oracle: plain torch, row by row, without the z-loss that training adds."""
    model = Model(load_model_config(TINY, ["vocab_size=512"]))
    model.init_weights(3)
    rows = held_out_plan(EvaluateConfig(rows=5), plan)
    sums, weights = [0.0, 0.0], [0.0, 0.0]
    with torch.no_grad():
        for step in Loader(rows, micro_batch=1):
            for batch in step:
                documents = Documents.build(batch.cu_seqlens, (1, 16))
                logits = model.eval().logits(model.hidden(batch.tokens, documents)[0])
                token_losses = cross_entropy(logits[0], batch.targets[0], reduction="none")
                sums[batch.sources[0]] += float((token_losses * batch.weights[0]).sum())
                weights[batch.sources[0]] += float(batch.weights.sum())
    objective = Objective(build_meta(model.config), z_loss=0.5)
    engine = Fsdp2Config().build(objective, AdamWConfig(), PRECISIONS["fp32"], parallel)
    load_weights(engine, dict(model.named_parameters()))
    before = [fragment.data.clone() for fragment in engine.fragments()]
    evaluator = Evaluator(rows, Loader(rows, micro_batch=3), parallel, every=1)
    result = evaluator(engine)
    assert result.names == ["web", "code"] and result.stats.rows == [5, 5]
    assert result.stats.losses == pytest.approx(sums, rel=1e-5)
    assert result.stats.weights == pytest.approx(weights)
    assert evaluator(engine).stats == result.stats
    assert objective.training and all(p.grad is None for p in objective.parameters())
    after = [fragment.data for fragment in engine.fragments()]
    assert all(map(torch.equal, before, after))


def test_unusable_evaluation_datasets_are_rejected(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no source of the mixture has a `test` beside it"):
        held_out_plan(EvaluateConfig(split="test"), plan)
    with pytest.raises(PlanError, match="too few tokens to evaluate on a row of 100,000"):
        held_out_plan(EvaluateConfig(seq_len=100_000), plan)
    foreign = str(tmp_path / "other")
    write_dataset(foreign, random_documents(1, 9), fingerprint="another")
    with pytest.raises(PlanError, match="another tokenizer"):
        held_out_plan(EvaluateConfig(sources={"other": foreign}), plan)


def test_another_configuration_has_another_plan_file() -> None:
    names = [
        held_out_digest(c)
        for c in (EvaluateConfig(), EvaluateConfig(every=7), EvaluateConfig(rows=2))
    ]
    assert names[0] == names[1] != names[2]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["kind=fsdp2", pytest.param("zero=3", marks=pytest.mark.long)])
def test_evaluation_does_not_change_training(
    plan: Plan, trainer: Any, tmp_path: Path, engine: str
) -> None:
    """Two ranks; evaluation at every second step; the run is interrupted and resumed."""
    mixture = tmp_path / "mixture.yaml"
    sources = "".join(f"  {n}: {{data: {tmp_path / n / 'train'}}}\n" for n in ("web", "code"))
    mixture.write_text(
        f"sources:\n{sources}phases:\n  one: {{tokens: 384, seq_len: 16, batch: 64, "
        "weights: {web: 0.5, code: 0.5}}\n"
    )
    words = ["--mixture", str(mixture), "model.vocab_size=512", "--processes", "2"]
    words += ["synthetic=null", "engine.kind=deepspeed", f"engine.{engine}"]
    whole = tmp_path / "whole"
    trainer.run(*words, out=whole)
    words += ["evaluate.every=2", "evaluate.rows=3"]
    stderr = trainer.run(*words, "--stop-after", "3", code=85)
    assert "held out  all" in stderr
    trainer.run(*words)
    assert trainer.lines("ledger.jsonl") == trainer.lines("ledger.jsonl", whole)
    assert trainer.losses() == trainer.losses(whole)
    result = trainer.lines("evaluations.jsonl")
    assert [entry["step"] for entry in result] == [1, 3, 5]
    assert result[0]["sources"].keys() == {"web", "code"}
