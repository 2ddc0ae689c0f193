"""Train a transformers model in a plain loop on the rows of a comparison, to the same step.

    python -m benchmarks.hybrids.peer FOLDER --steps 400

FOLDER is that of `headrace compare-hybrids`, whose first model transformers has as a class (Qwen3).
Model, mask, loss, AdamW and clipping are those of transformers and torch; rows come from headrace's
loader, and the initial weights are drawn from headrace's distribution with a seed of their own. The
loop hashes its rows as a run's ledger does. It continues from FOLDER/peers/transformers, whose
files the next `headrace compare-hybrids` reads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from headrace.dataplane.loader import Batch, Loader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.runlog import ledger
from headrace.dataplane.runlog.ledger import LedgerEntry
from headrace.dataplane.runlog.writer import LineWriter
from headrace.mixtures.learning_rate import lr_factor
from headrace.mixtures.planning.resolve_mixture import resolve_file
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.options.attention import AttentionOptions
from headrace.models.conversion.folders import write_model
from headrace.models.model.model import initial_weights
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.loop.evaluate import plan_held_out
from headrace.trainer.run import config as run_config

SEED = 4
"""Of the initial weights: none of the comparison's."""


def initial_model(config: ModelConfig) -> nn.Module:
    """Draw weights from headrace's distribution, and load them into transformers' class.

    The class has one epsilon for all norms.
    """
    operators = {
        name: replace(options, qk_norm_eps=config.norm_eps)
        if isinstance(options, AttentionOptions)
        else options
        for name, options in config.operators.items()
    }
    config = replace(config, operators=operators)
    with tempfile.TemporaryDirectory() as folder:
        write_model(config, initial_weights(config, SEED), f"{folder}/model", format="huggingface")
        model: nn.Module = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    return model.float()


def document_mask(batch: Batch) -> Tensor:
    """Return the additive mask [rows, 1, length, length] of causal attention within documents."""
    positions = batch.positions
    documents = (positions == 0).cumsum(dim=1)
    visible = (documents[:, :, None] == documents[:, None, :]).tril()
    return torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[:, None]


def loss_sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return Σ w·ℓ and Σ w by row."""
    logits = model(
        input_ids=batch.tokens,
        position_ids=batch.positions.long(),
        attention_mask=document_mask(batch),
        use_cache=False,
    ).logits
    losses = cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
    return (losses.view_as(batch.weights) * batch.weights).sum(dim=1), batch.weights.sum(dim=1)


@torch.no_grad()
def evaluate(model: nn.Module, plan: Plan, micro_batch: int) -> dict[str, dict[str, float]]:
    """Return the loss on held-out rows by source."""
    sums = {source.name: [0.0, 0.0] for source in plan.sources}
    for batches in Loader(plan, micro_batch=micro_batch):
        for batch in batches:
            for source, loss, weight in zip(
                batch.sources, *map(Tensor.tolist, loss_sums(model, batch)), strict=False
            ):
                sums[plan.sources[source].name][0] += loss
                sums[plan.sources[source].name][1] += weight
    return {
        name: {"loss": loss / weight, "weight": weight} for name, (loss, weight) in sums.items()
    }


def build_optimizer(model: nn.Module, config: AdamWConfig) -> torch.optim.Optimizer:
    """Return torch's AdamW. Vectors have no decay, as in headrace."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps)


def drop_lines(file: Path, step: int) -> None:
    """Remove the lines of steps after the saved state, which a killed loop left."""
    if file.exists():
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if json.loads(line)["step"] < step))


def train(folder: Path, num_steps: int) -> None:
    run = run_config.load(folder / "settings.yaml")
    assert isinstance(run.optimizer, AdamWConfig) and run.evaluate is not None
    torch.set_num_threads(run.threads or 1)
    plan = resolve_file(folder / "mixture.yaml")
    held_out = plan_held_out(run.evaluate, plan)
    micro_batch = run.micro_batch_tokens // max(phase.seq_len for phase in plan.phases)
    (model_file,) = (folder / "models").glob("transformer*.yaml")
    out = folder / "peers" / "transformers"
    out.mkdir(parents=True, exist_ok=True)
    model = initial_model(load_model_config(model_file))
    optimizer = build_optimizer(model, run.optimizer)
    step, digest = 0, plan.hash
    if (out / "state.pt").exists():
        state = torch.load(out / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, digest = state["step"], state["ledger"]
    names = ("metrics", "evaluations", "ledger")
    for name in names:
        drop_lines(out / f"{name}.jsonl", step)
    metrics, evaluations, rows = (LineWriter(out / f"{name}.jsonl") for name in names)
    model.train()
    for number, batches in zip(
        range(step, num_steps), Loader(plan, micro_batch=micro_batch, start_step=step), strict=False
    ):
        began = time.perf_counter()
        planned = plan.step(number)
        weight = sum(float(batch.weights.sum()) for batch in batches)
        loss = 0.0
        for batch in batches:
            objective = loss_sums(model, batch)[0].sum() / weight
            objective.backward()
            loss += objective.item()
        nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = run.optimizer.lr * lr_factor(plan, number)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        tokens = (number + 1) * planned.rows * planned.phase.seq_len
        digest = ledger.roll(digest, b"".join(d for batch in batches for d in batch.digests))
        rows.write(asdict(LedgerEntry(number, planned.first_row, planned.rows, digest)))
        speed = planned.rows * planned.phase.seq_len / seconds
        metrics.write({"step": number, "tokens": tokens, "loss": loss, "tokens_per_second": speed})
        if (number + 1) % run.evaluate.every == 0:
            sources = evaluate(model, held_out, micro_batch)
            evaluations.write({"step": number, "tokens": tokens, "sources": sources})
            print(
                number + 1,
                tokens,
                {name: round(s["loss"], 4) for name, s in sources.items()},
                flush=True,
            )
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": max(step, num_steps),
        "ledger": digest,
    }
    torch.save(state, out / "state.part")
    (out / "state.part").replace(out / "state.pt")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args(words)
    train(arguments.folder, arguments.steps)


if __name__ == "__main__":
    main()
