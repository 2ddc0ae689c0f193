"""Keys of DeepSpeed: the configuration that they become, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.console.errors import ConfigError, LayoutError
from headrace.models.config.options.precision import PRECISIONS
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.zero.settings import EXTRA, OWN_KEYS, PERSISTENT, ZERO
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.run import config as run_config

FP32, BF16 = PRECISIONS["fp32"], PRECISIONS["bf16"]


def engine(*words: str) -> Any:
    keys = [f"engine.{word}" for word in words]
    return run_config.build({}, keys, source="the command line").engine


def settings(*words: str, precision: Any = BF16, device: str = "cuda") -> dict[str, Any]:
    result: dict[str, Any] = engine(*words).settings(
        precision, device, 512, 256, split_experts=False
    )
    return result


def test_keys_reach_deepspeed_under_its_own_names() -> None:
    plain = settings("zero=2")
    assert plain["communication_data_type"] == "fp32" and "offload_optimizer" not in plain[ZERO]
    assert (plain[ZERO]["reduce_bucket_size"], plain[ZERO]["allgather_bucket_size"]) == (512, 256)
    changed = settings(
        "zero=3",
        "communication_data_type=bf16",
        "offload_optimizer=cpu",
        "zero_hpz_partition_size=8",
        "extra.zero_optimization.sub_group_size=100M",
        "extra.wall_clock_breakdown=true",
    )
    assert changed["communication_data_type"] == "bf16" and changed["wall_clock_breakdown"] is True
    # The optimizer stays headrace's: DeepSpeed's own is compiled C++.
    assert changed["zero_force_ds_cpu_optimizer"] is False
    expected = {"stage": 3, "zero_hpz_partition_size": 8, "sub_group_size": 100_000_000}
    assert expected.items() <= changed[ZERO].items()
    assert changed[ZERO]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    on_cpu = settings("offload_optimizer=cpu", device="cpu")
    assert on_cpu[ZERO]["offload_optimizer"]["pin_memory"] is False, "there is nothing to pin for"


@pytest.mark.parametrize(
    ("words", "precision", "device", "overlaps"),
    [
        (["zero=2"], BF16, "cuda", True),
        (["zero=3"], BF16, "cuda", True),
        (["zero=1"], FP32, "cuda", True),
        (["zero=1", "offload_optimizer=cpu"], BF16, "cuda", True),
        (["zero=1"], BF16, "cuda", False),  # DeepSpeed reduces after the last backward pass
        (["zero=0"], FP32, "cuda", False),
        (["zero=2"], BF16, "cpu", False),
        (["zero=2", "overlap_comm=false"], BF16, "cuda", False),
        (["zero=2", "overlap_comm=true"], BF16, "cpu", True),
    ],
)
def test_reductions_overlap_with_the_backward_pass_on_a_gpu(
    words: list[str], precision: Any, device: str, overlaps: bool
) -> None:
    result = settings(*words, precision=precision, device=device)
    assert result[ZERO]["overlap_comm"] is overlaps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["extra.optimizer.type=Adam"], "extra.optimizer: has a key of its own: optimizer"),
        (["extra.gradient_clipping=1.0"], "has a key of its own: optimizer.clip"),
        (["extra.fp16.enabled=true"], "extra.fp16: has a key of its own: precision"),
        (["extra.zero_optimization.stage=2"], "has a key of its own: engine.zero"),
        (["extra.zero_optimization.overlap_comm=true"], "engine.overlap_comm"),
        (["extra.zero_optimization.zero_quantized_weights=true"], "would change results"),
        (["extra.zero_optimization.round_robin_gradients=true"], "the places of the state"),
        (["extra.wall_clock_brakedown=true"], "or DeepSpeed does not know it"),
        (["extra.zero_optimization=true"], "extra.zero_optimization: should be a section"),
        (["reduce_bucket_size=3"], "reduce_bucket_size: must be even and at least 2, not 3"),
        (["zero=2", "zero_hpz_partition_size=2"], "needs zero=3: zero=2 keeps the weights whole"),
        (["zero=0", "offload_optimizer=cpu"], "offload_optimizer: needs zero=1, 2 or 3"),
        (["offload_optimizer=nvme"], "offload_optimizer"),
    ],
)
def test_what_would_break_a_promise_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine(*words)
    assert message in str(error.value)


def test_layouts_that_a_key_does_not_take_are_refused() -> None:
    def check(words: list[str], processes: int = 8, **degrees: int) -> None:
        engine(*words).check(LayoutConfig(**degrees), processes, BF16)

    check(["zero=3", "zero_hpz_partition_size=4"])
    with pytest.raises(LayoutError, match="joins neighbouring ranks"):
        check(["zero=3", "zero_hpz_partition_size=4"], tp=2)
    with pytest.raises(LayoutError, match="does not divide the 8 ranks"):
        check(["zero=3", "zero_hpz_partition_size=3"])
    with pytest.raises(LayoutError, match="reduces gradients after the last backward pass"):
        check(["zero=1", "overlap_comm=true"])
    check(["zero=1", "offload_optimizer=cpu"], ep=2)


def test_deepspeed_knows_every_name() -> None:
    """Fields of DeepSpeed's own schema: a name that it does not know would do nothing."""
    from deepspeed.runtime.config import DeepSpeedConfig as Theirs
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields.items()
    known = {name for name, _ in fields} | {str(field.alias) for _, field in fields}
    ours = {path.partition(".")[2] for path in OWN_KEYS if path.startswith(ZERO)} | {*EXTRA[ZERO]}
    assert ours <= known and "sub_group_sise" not in known
    assert DeepSpeedZeroConfig().param_persistence_threshold == PERSISTENT
    result = Theirs({**settings("zero=3", "offload_optimizer=cpu"), "train_batch_size": 1})
    zero = result.zero_config
    assert zero.offload_optimizer.device == "cpu" and zero.overlap_comm
    assert result.zero_force_ds_cpu_optimizer is False


def test_the_description_names_what_is_unusual() -> None:
    assert DeepSpeedConfig().describe() == "DeepSpeed ZeRO-1"
    shown = engine("zero=3", "offload_optimizer=cpu", "zero_hpz_partition_size=8").describe()
    assert shown == "DeepSpeed ZeRO-3, optimizer on the CPU, hpz 8"
