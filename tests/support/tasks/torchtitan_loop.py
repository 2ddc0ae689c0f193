# ruff: noqa: E402, modules of the package are imported after its needs are replaced
"""torchtitan's trainer over a stream on CPU ranks, as an argument list:

    torchtitan_loop.py PLAN FOLDER STEPS MICRO_BATCH     under torchrun

`stream_loader` is the loader of docs/loader.md. torchtitan expects an accelerator, so its module of
the device, its fused attention and its timeouts are replaced by what a CPU has.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.tools import utils

SEQ_LEN, BATCH_ROWS = 32, 12


class Cpu:
    """torch.cpu, with what torchtitan asks of an accelerator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: object = None) -> str:
        return "cpu"

    def get_device_properties(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: object) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def attend(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, **options: Any) -> Any:
    """Compute FlexAttention with a dense mask: it has no backward pass on a CPU."""
    mask = flex_attention.create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], "cpu")
    out = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=options["enable_gqa"])
    return out, SimpleNamespace(lse=None)


# Before any other module of torchtitan copies these names.
utils.device_type, utils.device_module = "cpu", Cpu()
utils.get_local_device = lambda: torch.device("cpu")

from stream_loader import StreamLoader
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed import utils as distributed
from torchtitan.models.common import attention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

distributed.set_pg_timeouts = lambda **_: None
attention._compiled_create_block_mask = flex_attention.create_block_mask
attention.FlexAttention._compiled_flex_attn = staticmethod(attend)


class NoTokenizer(BaseTokenizer):
    """A stream holds ids."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, tokenizer_path: str) -> None:
        pass

    def encode(self, *_: object) -> Any: ...

    def decode(self, *_: object) -> Any: ...

    def get_vocab_size(self) -> Any: ...


def main(plan: str, folder: str, steps: str, micro_batch: str) -> None:
    spec = model_registry("debugmodel", attn_backend="flex")
    del spec.model.layers[1:]
    config = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        tokenizer=NoTokenizer.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=40),
        training=TrainingConfig(
            local_batch_size=int(micro_batch),
            global_batch_size=BATCH_ROWS,
            seq_len=SEQ_LEN,
            steps=int(steps),
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        dataloader=StreamLoader.Config(dataset=plan),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=1000, last_save_model_only=False),
        dump_folder=folder,
        debug=DebugConfig(seed=0),
    )
    trainer = config.build()
    for model in trainer.model_parts:
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo has no other reduction
                module.set_force_sum_reduction_for_comms(True)
    rows: list[list[int]] = []
    losses: list[float] = []
    forward, log = trainer.forward_backward_step, trainer.metrics_processor.log

    def keep_rows(*, input_dict: dict[str, torch.Tensor], **more: Any) -> Any:
        rows.extend(input_dict["input"].tolist())
        return forward(input_dict=input_dict, **more)

    def keep_loss(step: int, loss: float, *numbers: Any, **more: Any) -> None:
        losses.append(float(loss))
        log(step, loss, *numbers, **more)

    trainer.forward_backward_step, trainer.metrics_processor.log = keep_rows, keep_loss
    trainer.train()
    trainer.close()
    seen = {"rows": rows, "losses": losses}
    name = f"{os.environ['WORLD_SIZE']}-{os.environ['RANK']}.json"
    Path(folder, name).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
