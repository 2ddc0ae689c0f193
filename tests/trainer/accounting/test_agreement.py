"""`headrace models show` and `trainer run --dry-run` print the same memory."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner
from support.configs import CONFIGS

from headrace.console.headrace import main
from headrace.models.accounting.count import build_meta
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.trainer.accounting.describe import describe

TINY = CONFIGS / "tiny.yaml"
LAYOUT = ["--dp", "2", "--tp", "2", "--cp", "2"]
ENGINES = {
    "ZeRO-0": (["engine.zero=0"], "fp32"),
    "ZeRO-1": (["engine.zero=1"], "fp32"),
    "ZeRO-2": (["engine.zero=2"], "fp32"),
    "ZeRO-3": (["engine.zero=3"], "fp32"),
    "ZeRO-1 in bf16": (["engine.zero=1"], "bf16"),
    "ZeRO-2 in bf16": (["engine.zero=2"], "bf16"),
    "ZeRO-3 in bf16": (["engine.zero=3"], "bf16"),
    "FSDP2": (["engine.kind=fsdp2"], "fp32"),
    "FSDP2 in bf16": (["engine.kind=fsdp2"], "bf16"),
    "HSDP": (["engine.kind=fsdp2", "engine.shard=2", "engine.gather=micro-batch"], "bf16"),
}


def block_sizes() -> list[int]:
    """Return the bf16 parameters of each block."""
    model = build_meta(load_model_config(TINY))
    fp32 = model.full_precision(PRECISIONS["bf16"])
    sizes = {name: p.numel() for name, p in model.named_parameters() if name not in fp32}
    return [
        sum(size for name, size in sizes.items() if name.startswith(f"blocks.{number}."))
        for number in range(len(model.config.layers))
    ]


def shown(*words: str, model: str = str(TINY)) -> Any:
    short = [] if "--seq-len" in words else ["--seq-len", "16"]
    result = CliRunner().invoke(main, ["models", "show", model, *short, *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["memory"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ENGINES)
def test_both_commands_print_the_same_memory(ask: Any, name: str, device: str) -> None:
    words, precision = ENGINES[name]
    layout = ["processes=8", "layout.tp=2", "layout.cp=2"]
    options = [f"precision={precision}", f"device={device}"]
    micro = ["micro_batch_tokens=16", "synthetic.seq_len=16"]
    job = ask(*layout, *micro, *options, *words, model="tiny-hybrid", dry_run=True)
    about = describe(job, activations=True)
    planned, (phase,) = about["memory"], about["batch"]
    options = [part for word in [*words, f"device={device}"] for part in ("--run", word)]
    batch = ["--seq-len", "16", "--rows", str(phase["micro_batch_rows"])]
    memory = shown(*LAYOUT, *batch, "--precision", precision, *options, model="tiny-hybrid")
    assert planned == memory["step"]["none"] and planned["activations"] > 0


def test_gathered_weights_are_counted(ask: Any) -> None:
    """With gather: micro-batch, FSDP2 keeps all weights from the forward to the backward pass."""
    sharded = shown("--dp", "4", "--run", "engine.kind=fsdp2")["state"]
    gathered = shown(
        "--dp", "4", "--run", "engine.kind=fsdp2", "--run", "engine.gather=micro-batch"
    )["state"]
    embedding, norm = 37 * 36, 36  # by block, these are whole between the passes
    blocks = block_sizes()
    assert sharded.pop("weights") == 2 * (embedding + norm + max(map(sum, pairwise(blocks))))
    whole = gathered.pop("weights")
    assert whole == 2 * (embedding + norm + sum(blocks)) and gathered == sharded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run", "engine.kind=fsdp3"], "`fsdp3` is unknown; did you mean `fsdp2`?"),
        (["--run", "engine.kind=fsdp2", "--zero", "3"], "engine.zero: unknown key"),
        (["--run", "precision=fp32"], "precision: is not of engine, optimizer, device"),
        (["--zero", "0"], "engine.zero=0"),
    ],
)
def test_engines_that_cannot_be_counted_are_errors(words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["models", "show", str(TINY), *words])
    assert result.exit_code == 1 and message in result.stderr


def test_zero_is_short_for_the_engines_key() -> None:
    assert shown("--zero", "3", "--dp", "2") == shown("--run", "engine.zero=3", "--dp", "2")
