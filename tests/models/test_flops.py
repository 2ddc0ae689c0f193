"""Operation counts against torch's counter, and memory of training and generation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headrace.console.errors import LayoutError
from headrace.models.accounting.count import (
    TRAINING,
    build_meta,
    count_active_parameters,
    count_parameters,
    forward_flops,
    matrix_flops,
    step_flops,
)
from headrace.models.accounting.level import EngineMemory, EngineState, Level
from headrace.models.accounting.memory import generation_bytes, rank_shards
from headrace.models.accounting.passes import model_passes
from headrace.models.accounting.shape import Shape
from headrace.models.accounting.state import (
    Degrees,
    Shards,
    StatePart,
    cut_flat,
    cut_parameters,
    cut_rows,
    state_bytes,
)
from headrace.models.accounting.summary import describe
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.config.options.recompute import Unit
from headrace.models.layers.attention.rows import CHANNELS
from headrace.models.layers.delta.rule import BLOCK
from headrace.models.model.model import Model
from headrace.models.parallel.local_shard import LocalShard

ROWS, LENGTH = 2, 64


class Lasting(EngineMemory):
    """An engine whose state lasts through the step."""

    def __init__(self, parts: Sequence[StatePart], shards: Shards, degrees: Degrees) -> None:
        self.parts = state_bytes(parts, shards, degrees)

    def begin(self, level: Level) -> None:
        for name, size in self.parts.items():
            level.add(name, size)

    def enter(self, level: Level, unit: int | None, *, backward: bool) -> None: ...

    def leave(self, level: Level, unit: int | None, *, backward: bool) -> None: ...

    def gradient(self, level: Level, name: str, size: int, *, last: bool) -> None: ...

    def end_backward(self, level: Level, *, last: bool) -> None: ...

    def update(self, level: Level) -> None: ...


PRODUCTS_ONLY = {
    "mha", "gqa", "window", "llama3", "mamba2", "mamba2-groups", "mamba2-plain", "se",
    "mr-direct", "mr-toeplitz", "mr-heads", "hyena-mlp", "hyena-mlp-savanna",
}  # fmt: skip
"""Operators whose operations are all products that torch counts."""


def counted_by_torch(model: Model, length: int) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(ROWS, length, dtype=torch.int64))
    return int(counter.get_total_flops())


def test_operators_agree_with_torch(tiny_operator: Model) -> None:
    config = tiny_operator.config
    name = config.layers[0].mixer
    ours = sum(forward_flops(build_meta(config), LENGTH).values()) * ROWS * LENGTH
    theirs = counted_by_torch(tiny_operator, LENGTH)
    operator = tiny_operator.typed_blocks()[0].mixer.operator
    layers = len(config.layers) * ROWS * LENGTH
    if name in PRODUCTS_ONLY:
        assert ours == theirs
    elif name.startswith("mla"):  # heads are padded to the widest of queries, keys and values
        options = operator.options
        padding = 2 * options.head_dim - options.qk_head_dim - options.v_head_dim
        assert ours + 2 * padding * LENGTH * options.heads * layers == theirs
    elif name == "gated":  # a sink is a key, and channels of all
        heads, head_dim = operator.options.heads, operator.head_dim
        padded = (LENGTH + 1) * (head_dim + CHANNELS) - LENGTH * head_dim
        assert ours + 4 * padded * heads * layers == theirs
    elif name.startswith("mamba1"):
        # torch counts the read-out as a product, and not the rest of the recurrence.
        scan_flops = operator.flops(LENGTH)["scan"]
        assert ours - 5 / 7 * scan_flops * layers == theirs
    elif name in ("gdn", "kda"):  # torch does not count triangular systems
        options = operator.options
        system = min(options.chunk, LENGTH) * (options.key_head_dim + options.value_head_dim)
        saved = 0.0
        if name == "kda":  # plain torch multiplies the halves of a block, whose all pairs count
            starts = range(0, options.chunk, BLOCK)
            pairs = [min(BLOCK, options.chunk - start) ** 2 for start in starts]
            halves = BLOCK * (BLOCK - 1) // 2 * len(pairs)
            saved = 2 * 2 * options.key_head_dim * (sum(pairs) - halves) / options.chunk
        assert ours - options.state_heads * (system + saved) * layers == theirs
    elif name in ("li", "li-product", "li-factored"):
        filters = 2 * 2 * 16 * operator.options.state_size * 8
        assert ours + filters == theirs
    elif name in ("li-complex", "li-s4d"):
        # A complex product is 8 operations, which torch counts as 2; the filter is computed once.
        filters = 2 * 2 * 16 * 2 * operator.options.chunk
        assert ours - 6 * 2 * 16 * 2 * layers + filters == theirs
    elif name in ("li-fft", "mr-fft", "li-heads"):
        featurizer, heads = 2 * 48 * 3, {"li-heads": 2 * 16 * 4}.get(name, 0)
        mixing_flops = sum(operator.flops(LENGTH).values()) - featurizer - heads
        filters = 2 * 2 * {"li-fft": 16 * 4, "li-heads": 4 * 2}.get(name, 0) * LENGTH
        assert ours - mixing_flops * layers + filters == theirs
    else:
        weights = {
            "freeform": 33 * 16 + 16 * 16 * 3,
            "freeform-learned": 5 * 16 + 16 * 16 * 2,
            "freeform-heads": 33 * 16 + 16 * 16 * 2 + 16 * 8,
        }
        network = 2 * 2 * weights[name] * 40
        assert ours + network == theirs


@pytest.mark.parametrize("name", ["tiny-transformer", "tiny-zamba", "tiny-moe"])
def test_whole_models_agree_with_torch(name: str) -> None:
    config = load_model_config(name)
    model = Model(config)
    model.init_weights(0)
    ours = sum(forward_flops(build_meta(config), LENGTH).values()) * ROWS * LENGTH
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
    ours = sum(forward_flops(build_meta(config), LENGTH).values()) * ROWS * LENGTH
    assert ours == counted_by_torch(model, LENGTH)


def test_training_is_three_forward_passes() -> None:
    config = load_model_config("tiny-hybrid", ["pattern='[glu/none] * 3'"])
    model = Model(config)
    model.init_weights(0)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    ours = TRAINING * sum(forward_flops(build_meta(config), LENGTH).values()) * ROWS * LENGTH
    assert ours == counter.get_total_flops()


def test_generation_costs_less_than_attention_over_everything() -> None:
    config = load_model_config("evo2-7b-8k")
    step = step_flops(build_meta(config), 8192)
    assert step["attention"] == forward_flops(build_meta(config), 8192)["attention"]
    assert step["li"] < forward_flops(build_meta(config), 8192)["li"]
    assert step["li"] == step_flops(build_meta(config), 1_000_000)["li"]


def test_only_matrices_applied_to_tokens_are_counted() -> None:
    linear = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    assert matrix_flops(linear) == 2 * 15


def test_activations_by_layout() -> None:
    """Two ranks keep more than half: states, halos and gathered inputs."""
    config = load_model_config("tiny-hybrid")
    whole = kept_on(config, Degrees(), "none")
    assert kept_on(config, Degrees(), "block") < kept_on(config, Degrees(), "operator") < whole
    for degrees in (Degrees(tp=2), Degrees(cp=2)):
        assert 0.51 < kept_on(config, degrees, "none") / whole < 0.7


def kept_on(config: ModelConfig, degrees: Degrees, unit: Unit) -> int:
    """Return the bytes that all layers keep with this unit of recompute."""
    shape = Shape(rows=2, seq_len=256, precision=PRECISIONS["bf16"], device="cpu", degrees=degrees)
    passes = model_passes(config, shape, [unit] * len(config.layers))
    return sum(layer.activations for layer in passes.layers)


def test_tensor_ranks_hold_their_shards() -> None:
    config = load_model_config("tiny-hybrid")
    count = count_parameters(Model(config))
    shards = rank_shards(config, Degrees(tp=2), 1)
    here = cut_flat({name: shard.local for name, shard in shards.items()}, 1)
    # Norms and other small parameters are replicated on every rank of the tensor axis.
    assert 1 <= 2 * here / count < 1.02
    message = r"operators\.attention: tp=8 does not divide its 4 heads"
    with pytest.raises(LayoutError, match=message):
        rank_shards(config, Degrees(tp=8), 0)


def whole_shards(shapes: dict[str, tuple[int, ...]]) -> dict[str, LocalShard]:
    return {name: LocalShard(shape) for name, shape in shapes.items()}


def test_expert_ranks_hold_their_experts() -> None:
    """Each rank has a quarter of the experts; among 8 ranks, 2 hold the same ones."""
    config = load_model_config("tiny-moe")
    degrees = Degrees(dp=4, tp=2, ep=4)
    whole, shards = (rank_shards(config, item, 0) for item in (Degrees(), degrees))
    names = [name for name, shard in shards.items() if shard.experts]
    assert names == [name for name in whole if name.endswith((".gate_up", ".down"))]
    sizes = {name: math.prod(whole[name].local) for name in names}
    assert all(4 * math.prod(shards[name].local) == sizes[name] for name in names)
    part = StatePart(name="masters", bytes_per_parameter=4, sharded_over=("dp", "cp"))
    held = {name: shards[name] for name in names}
    assert part.bytes(held, degrees) == 4 * sum(sizes.values()) // 8
    message = r"ep=3 .* 4 ranks[\s\S]*ep=3 does not divide its 4 experts"
    with pytest.raises(LayoutError, match=message):
        rank_shards(config, Degrees(dp=4, ep=3), 0)
    with pytest.raises(LayoutError, match="the model has none"):
        rank_shards(load_model_config("tiny-hybrid"), Degrees(dp=4, ep=2), 0)


def test_state_is_sharded_as_its_parts_say() -> None:
    shards = whole_shards({"matrix": (5, 3), "vector": (4,), "scalar": ()})
    degrees = Degrees(dp=2, cp=2, tp=3)
    whole = StatePart(name="weights", bytes_per_parameter=2)
    for cut, elements in ((cut_flat, 5), (cut_parameters, 4 + 1 + 1), (cut_rows, 2 * 3 + 1 + 1)):
        sharded = StatePart(
            name="masters", bytes_per_parameter=4, sharded_over=("dp", "cp"), cut=cut
        )
        assert state_bytes([whole, sharded, whole], shards, degrees) == {
            "weights": 2 * 20 * 2,
            "masters": 4 * elements,
        }
    over_cp = StatePart(name="masters", bytes_per_parameter=4, sharded_over=("cp",))
    replicas = StatePart(
        name="masters", bytes_per_parameter=4, sharded_over=("dp", "cp"), shard_ranks=2
    )
    assert over_cp.bytes(shards, degrees) == replicas.bytes(shards, degrees) == 4 * 10


def test_optimizer_state_may_differ_by_parameter() -> None:
    shards = whole_shards({"matrix": (5, 3), "vector": (4,)})
    part = StatePart(
        name="optimizer", bytes_per_parameter=lambda name: {"matrix": 4, "vector": 8}[name]
    )
    assert part.bytes(shards, Degrees()) == 4 * 15 + 8 * 4


def test_active_parameters_are_those_that_a_token_uses() -> None:
    """A token uses one of eight experts: FLOPs are near 6 N of the active parameters."""
    config = load_model_config("blackmamba-1.5b")
    model = build_meta(config)
    unused = 15 * 7 * 3 * 1152 * 3072
    assert count_active_parameters(model) == count_parameters(model) - unused
    six_n = 6 / (TRAINING * sum(forward_flops(build_meta(config), 2048).values()))
    assert abs(six_n * count_active_parameters(model) - 1) < 0.1
    assert six_n * count_parameters(model) - 1 > 3, "a negative control"
    dense = build_meta(load_model_config("tiny-zamba"))
    assert count_active_parameters(dense) == count_parameters(dense)


def test_state_bytes_are_those_of_generation(tiny: Model) -> None:
    states = tiny.float().new_states(50)
    with torch.no_grad():
        tiny(torch.zeros(1, 3, dtype=torch.int64), states=states)
    real = sum(
        t.nbytes
        for layer_states in states
        for state in layer_states
        for t in state.tensors.values()
    )
    assert generation_bytes(tiny.config, 50, precision=PRECISIONS["fp32"]) == real


def test_the_json_description_is_complete() -> None:
    parts = [StatePart(name="weights", bytes_per_parameter=4)]
    engine = EngineState(
        engine="test", device="cpu", state_parts=parts, memory=partial(Lasting, parts)
    )
    fp32 = PRECISIONS["fp32"]
    config = load_model_config("tiny-hybrid")
    summary = describe(config, 256, engine, precision=fp32, degrees=Degrees())
    assert summary["memory"]["state"] == {"weights": 4 * summary["parameters"]}
    assert summary["parameters"] == sum(summary["parameters_by_part"].values()) == 1_169_736
    forward = forward_flops(build_meta(config), 256)
    assert summary["training_flops_per_token"] == TRAINING * sum(forward.values())
    assert set(summary) >= {"memory", "layers", "forward_flops_per_token"}
