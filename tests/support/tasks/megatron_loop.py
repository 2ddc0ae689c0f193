# ruff: noqa: E402, modules of the package are imported after its needs are replaced
"""The schedule of megatron-core over a stream, with a small GPT in one CPU process:

    megatron_loop.py PLAN FILE

It writes the losses of 40 steps, of those of a loop that stopped after 11 and went on with other
micro-batches, and the largest difference between documents in rows and alone. Megatron expects a
GPU: what it asks of one is replaced.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader

from headrace.dataplane import Stream

SEQ_LEN, BATCH_ROWS, STEPS, STOP = 32, 12, 40, 11

new_zeros = torch.zeros


def zeros(*shape: Any, device: Any = None, **options: Any) -> Tensor:
    return new_zeros(*shape, device="cpu" if device == "cuda" else device, **options)


torch.zeros = zeros  # type: ignore[assignment]
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=contextlib.nullcontext)

Item = dict[str, Tensor]


def new_model() -> Any:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
    )
    layers = get_gpt_layer_local_spec()
    return GPTModel(config, layers, vocab_size=512, max_sequence_length=SEQ_LEN)


def losses_by_token(model: Any, item: Item) -> Tensor:
    words = (item["tokens"], item["position_ids"], item["attention_mask"])
    return model(*words, labels=item["labels"])


def forward_step(items: Iterator[Item], model: Any) -> Any:
    item = next(items)

    def sum_losses(losses: Tensor) -> Any:
        total = (losses.float() * item["loss_mask"]).sum()
        count = item["loss_mask"].sum().int()
        return total, count, {"total": float(total), "count": int(count)}

    return losses_by_token(model, item), sum_losses


def train(model: Any, dataset: Any, steps: int, micro_batch: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    items = iter(DataLoader(dataset, batch_size=None))
    losses = []
    for _ in range(steps):
        sums = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=items,
            model=model,
            num_microbatches=BATCH_ROWS // micro_batch,
            seq_length=SEQ_LEN,
            micro_batch_size=micro_batch,
            forward_only=False,
        )
        count = sum(part["count"] for part in sums)
        for parameter in model.parameters():  # Megatron's optimizer divides once, by this count
            parameter.grad /= count
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part["total"] for part in sums) / count)
    return losses


@torch.no_grad()
def isolation_error(model: Any, item: Item) -> tuple[int, float]:
    """Return the number of documents, and the largest difference in the loss of a token."""
    losses, count, worst = losses_by_token(model, item), 0, 0.0
    for row, positions in enumerate(item["position_ids"]):
        starts = torch.nonzero(positions == 0).flatten().tolist()
        for start, end in zip(starts, [*starts[1:], SEQ_LEN], strict=True):
            alone = {key: item[key][row : row + 1, start:end] for key in item if key[:4] != "atte"}
            ones = torch.ones(end - start, end - start, dtype=torch.bool)
            alone["attention_mask"] = ones.triu(1)[None, None]
            error = (losses_by_token(model, alone)[0] - losses[row, start:end]).abs().max()
            count, worst = count + 1, max(worst, float(error))
    return count, worst


def main(plan: str, file: str) -> None:
    method = f"file://{file}.rendezvous"
    distributed.init_process_group("gloo", rank=0, world_size=1, init_method=method)
    parallel_state.initialize_model_parallel()

    def new_dataset(micro_batch: int) -> Any:
        return Stream(plan).dataset(0, 1, micro_batch=micro_batch, names="megatron")

    whole = train(new_model(), new_dataset(4), STEPS, 4)
    model, first = new_model(), new_dataset(4)
    resumed = train(model, first, STOP, 4)
    second = new_dataset(3)
    second.load_state_dict(first.state_dict(step=STOP))
    resumed += train(model, second, STEPS - STOP, 3)
    documents, error = isolation_error(model, next(iter(new_dataset(12))))
    results = {"whole": whole, "resumed": resumed, "documents": documents, "error": error}
    Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
