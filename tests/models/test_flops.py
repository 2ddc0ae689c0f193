"""Operation counts against torch's counter, and memory of training and generation."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headrace.console.errors import LayoutError
from headrace.models.accounting import memory as memory_module
from headrace.models.accounting.count import (
    forward_flops_per_token,
    matrix_flops,
    parameters,
    step_flops_per_token,
    training_flops_per_token,
)
from headrace.models.accounting.memory import (
    DTYPES,
    Layout,
    Precision,
    activations,
    memory,
    state_bytes,
)
from headrace.models.accounting.show import describe
from headrace.models.config import ModelConfig, load_model_config
from headrace.models.loss import cross_entropy
from headrace.models.model import Model

ROWS, LENGTH = 2, 64
PRODUCTS_ONLY = {
    "mha", "gqa", "window", "llama3", "mamba2", "mamba2-groups", "se", "mr-direct",
    "mr-toeplitz", "hyena-mlp",
}  # fmt: skip
"""Operators whose operations are all products that torch counts."""


def counted_by_torch(model: Model, length: int) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(ROWS, length, dtype=torch.int64))
    return int(counter.get_total_flops())


def test_agrees_with_torch(tiny_operator: Model) -> None:
    config = tiny_operator.config
    name = config.layers[0].mixer
    ours = sum(forward_flops_per_token(config, LENGTH).values()) * ROWS * LENGTH
    theirs = counted_by_torch(tiny_operator, LENGTH)
    operator = tiny_operator.typed_blocks()[0].mixer.operator
    layers = len(config.layers) * ROWS * LENGTH
    if name in PRODUCTS_ONLY:
        assert ours == theirs
    elif name.startswith("mamba1"):
        # torch counts the read-out as a product, and not the rest of the recurrence.
        own = operator.flops(LENGTH)["scan"]
        assert ours - 5 / 7 * own * layers == theirs
    elif name == "li":
        filters = 2 * 2 * 16 * 4 * 8
        assert ours + filters == theirs
    elif name == "li-complex":
        # A complex product is 8 operations, which torch counts as 2; the filter is computed once.
        filters = 2 * 2 * 16 * 2 * 16
        assert ours - 6 * 2 * 16 * 2 * layers + filters == theirs
    elif name in ("li-fft", "mr-fft"):
        featurizer = 2 * 48 * 3
        own = sum(operator.flops(LENGTH).values()) - featurizer
        filters = 2 * 2 * 16 * 4 * LENGTH if name == "li-fft" else 0
        assert ours - own * layers + filters == theirs
    else:
        assert name == "freeform"
        network = 2 * 2 * (33 * 16 + 16 * 16 * 3) * 40
        assert ours + network == theirs


@pytest.mark.parametrize("name", ["tiny-transformer", "tiny-zamba", "tiny-moe"])
def test_whole_models_agree_with_torch(name: str) -> None:
    config = load_model_config(name)
    model = Model(config)
    model.init_weights(0)
    ours = sum(forward_flops_per_token(config, LENGTH).values()) * ROWS * LENGTH
    assert ours == counted_by_torch(model.eval(), LENGTH)


def test_experts_count_the_tokens_they_get() -> None:
    from headrace.console.config import build

    data = {
        "vocab_size": 23,
        "width": 16,
        "pattern": "[moe]",
        "operators": {"moe": {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 12}},
    }
    config = build(ModelConfig, data, source="a test")
    model = Model(config)
    model.init_weights(0)
    ours = sum(forward_flops_per_token(config, LENGTH).values()) * ROWS * LENGTH
    assert ours == counted_by_torch(model, LENGTH)


def test_training_is_three_forward_passes() -> None:
    config = load_model_config("tiny-hybrid", ["pattern='[glu/none] * 3'"])
    model = Model(config)
    model.init_weights(0)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    ours = training_flops_per_token(config, LENGTH) * ROWS * LENGTH
    assert ours == counter.get_total_flops()


def test_generation_costs_less_than_attention_over_everything() -> None:
    config = load_model_config("evo2-7b-8k")
    step = step_flops_per_token(config, 8192)
    assert step["attention"] == forward_flops_per_token(config, 8192)["attention"]
    assert step["li"] < forward_flops_per_token(config, 8192)["li"]
    assert step["li"] == step_flops_per_token(config, 1_000_000)["li"]


def test_only_matrices_applied_to_tokens_are_counted() -> None:
    linear = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    assert matrix_flops(linear) == 2 * 15


def test_memory_by_layout() -> None:
    config = load_model_config("tiny-hybrid")
    count = parameters(Model(config))
    whole = memory(config, 256, rows=2, precision="bf16", layout=Layout())
    assert whole["weights"] == 2 * count and whole["gradients"] == 4 * count  # sums in fp32
    assert whole["optimizer"] == 12 * count
    kept = whole["activations"]
    assert kept["block"] < kept["operator"] < kept["none"]
    for zero, parts in ((1, {"optimizer"}), (2, {"gradients"}), (3, {"weights"})):
        shared = memory(config, 256, rows=2, precision="bf16", layout=Layout(zero=zero, dp=4))
        before = memory(config, 256, rows=2, precision="bf16", layout=Layout(zero=zero - 1, dp=4))
        for name in ("weights", "gradients", "optimizer"):
            assert shared[name] == before[name] / (4 if name in parts else 1)
    for layout in (Layout(tp=2), Layout(cp=4), Layout(tp=2, cp=2, zero=3, dp=2)):
        part = memory(config, 256, rows=2, precision="bf16", layout=layout)
        here = part["weights"] * (layout.dp * layout.cp if layout.zero == 3 else 1)
        # Norms and other small parameters are replicated on every rank of the tensor axis.
        assert 1 <= here * layout.tp / whole["weights"] < 1.02
        kept = part["activations"]["none"] * layout.tp * layout.cp
        assert abs(kept - whole["activations"]["none"]) <= layout.tp * layout.cp
    with pytest.raises(
        LayoutError, match=r"operators\.attention: tp=8 does not divide its 4 heads"
    ):
        memory(config, 256, rows=2, precision="bf16", layout=Layout(tp=8))
    fp32 = memory(config, 256, rows=2, precision="fp32", layout=Layout())
    assert fp32["weights"] + fp32["optimizer"] == 12 * count


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_autograd_keeps(tiny: Model, precision: Precision) -> None:
    """Compare with real tensors, to the byte: each storage once, without parameters."""
    tiny.to(DTYPES[precision])
    tokens = torch.zeros(2, 100, dtype=torch.int64)
    weights = {p.untyped_storage().data_ptr() for p in tiny.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = cross_entropy(tiny(tokens), tokens.clone())
    real = (
        sum(storage.nbytes() for storage in kept.values()) - tokens.nbytes
    )  # ids are no activations
    layers, logits = activations(tiny.config, 100, rows=2, precision=precision)
    if len(tiny.config.layers) == 2:
        assert sum(layers) + logits == real
    assert abs((sum(layers) + logits) / real - 1) < 0.002
    del loss


def test_long_rows_are_extrapolated_from_shorter_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    window = "operators.attention={kind: attention, heads: 4, window: 9}"
    for changes in (
        ["pattern='[se, mr, li, mamba, attention]'"],
        ["pattern='[attention]'", window],
    ):
        config = load_model_config("tiny-hybrid", changes)
        whole = activations(config, 2048, rows=1, precision="bf16")
        monkeypatch.setattr(memory_module, "LONGEST", 1024)
        told = activations(config, 2048, rows=1, precision="bf16")
        monkeypatch.undo()
        for one, other in zip((*told[0], told[1]), (*whole[0], whole[1]), strict=True):
            assert abs(one / other - 1) < 0.01


def test_state_bytes_are_those_of_generation(tiny: Model) -> None:
    states = tiny.float().new_states(50)
    with torch.no_grad():
        tiny(torch.zeros(1, 3, dtype=torch.int64), states=states)
    real = sum(t.nbytes for own in states for state in own for t in state.tensors.values())
    assert state_bytes(tiny.config, 50, precision="fp32") == real


def test_describe_has_what_programs_read() -> None:
    summary = describe(load_model_config("tiny-hybrid"), 256)
    assert summary["parameters"] == sum(summary["parameters_by_part"].values()) == 1_169_736
    assert summary["training_flops_per_token"] == training_flops_per_token(
        load_model_config("tiny-hybrid"), 256
    )
    assert set(summary) >= {"memory", "layers", "forward_flops_per_token"}
