"""The stream in the loops of other libraries: stopped after 11 steps, and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from headrace.dataplane import Stream
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.stream.dataset import IGNORED, StreamDataset

STEPS, STOP = 40, 11
pytestmark = pytest.mark.slow


class Bigrams(nn.Module):
    """Predicts a token from the one before it, and keeps the rows that it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(512, 512)
        self.rows: list[list[int]] = []

    def forward(self, item: dict[str, Any]) -> Tensor:
        self.rows.append(item["rows"].tolist())
        losses = cross_entropy(
            self.table(item["tokens"]).flatten(0, 1), item["targets"].flatten(), reduction="none"
        )
        weights = item["weights"].flatten()
        return (losses * weights).sum() / weights.sum()


@pytest.fixture
def rows(changing: Plan) -> list[list[int]]:
    """The rows of the first steps; a step is one micro-batch of 12 rows."""
    items = iter(new_dataset(changing))
    return [next(items)["rows"].tolist() for _ in range(STEPS)]


def new_dataset(plan: Plan, **options: Any) -> StreamDataset:
    return Stream(plan).dataset(micro_batch=12, **options)


def test_accelerate(changing: Plan, rows: list[list[int]]) -> None:
    """The loader is not prepared: Accelerate would cut its items a second time."""
    from accelerate import Accelerator

    def run(first_step: int, end_step: int, bigrams: Bigrams) -> dict[str, Any]:
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(bigrams, torch.optim.SGD(bigrams.parameters(), 0.1))
        dataset = new_dataset(changing)
        dataset.load_state_dict({"plan": changing.hash, "step": first_step})
        items = iter(DataLoader(dataset, batch_size=None))
        for step in range(first_step, end_step):
            item = next(items)
            assert item["step"] == step
            accelerator.backward(model(item))
            optimizer.step()
            optimizer.zero_grad()
        return dataset.state_dict(step=end_step)

    bigrams = Bigrams()
    state = run(0, STOP, bigrams)
    run(state["step"], STEPS, bigrams)
    assert bigrams.rows == rows


def test_lightning(changing: Plan, rows: list[list[int]], tmp_path: Path) -> None:
    """Its checkpoint holds the state of a StatefulDataLoader."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.bigrams = Bigrams()

        def training_step(self, item: dict[str, Any], _index: int) -> Tensor:
            return self.bigrams(item)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def run(steps: int, checkpoint: Path | None = None) -> tuple[Module, Path]:
        module = Module()
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = StatefulDataLoader(new_dataset(changing), batch_size=None)
        trainer.fit(module, loader, ckpt_path=checkpoint)
        file = tmp_path / f"{steps}.ckpt"
        trainer.save_checkpoint(file)
        return module, file

    first, file = run(STOP)
    second, _ = run(STEPS, file)
    assert first.bigrams.rows + second.bigrams.rows == rows


def test_the_trainer_of_transformers(changing: Plan, tmp_path: Path) -> None:
    """Accumulated micro-batches are the plan's step: the weights are those of a plain loop."""
    import transformers

    class StreamTrainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> DataLoader:
            return DataLoader(self.train_dataset, batch_size=None)

    def new_model() -> transformers.LlamaForCausalLM:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            attn_implementation="eager",
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config)

    def train(model: Any, dataset: StreamDataset, steps: int) -> None:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            gradient_accumulation_steps=4,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        StreamTrainer(model, arguments, train_dataset=dataset).train()

    def dataset(step: int = 0) -> StreamDataset:
        stream = Stream(changing).dataset(micro_batch=3, names="transformers")
        stream.load_state_dict({"plan": changing.hash, "step": step})
        return stream

    trained = new_model()
    train(trained, dataset(), 3)
    train(trained, dataset(3), 2)
    plain = new_model().train()
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    items = iter(dataset())
    for _ in range(5):
        step = [next(items) for _ in range(4)]
        count = sum(int((item["labels"] != IGNORED).sum()) for item in step)
        for item in step:
            logits = plain(item["input_ids"], position_ids=item["position_ids"]).logits[:, :-1]
            labels = item["labels"][:, 1:]
            (
                cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(plain.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_positions_isolate_documents_in_transformers(changing: Plan) -> None:
    """A row with several documents has the logits of each document alone, if there is no cache."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    item = next(
        item
        for item in Stream(changing).dataset(names="transformers")
        if (item["position_ids"] == 0).sum() > 1
    )
    (starts,) = torch.nonzero(item["position_ids"][0] == 0, as_tuple=True)
    with torch.no_grad():
        whole = model(item["input_ids"], position_ids=item["position_ids"]).logits[0]
        for start, end in zip(starts, [*starts[1:], len(whole)], strict=True):
            alone = model(item["input_ids"][:, start:end]).logits[0]
            torch.testing.assert_close(whole[start:end], alone)
