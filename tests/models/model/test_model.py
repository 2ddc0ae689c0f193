"""Initialisation, precision, recompute, heads, compilation, and a short training."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch

from headrace.console.config import build
from headrace.console.errors import ConfigError
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.options.recompute import Recompute
from headrace.models.documents import Documents
from headrace.models.model.loss import cross_entropy
from headrace.models.model.model import Model
from headrace.models.operators import attention, base
from headrace.models.parallel.axes import Axes, Axis
from headrace.models.parallel.sharding import slice_local_shard


def tokens_of(rows: int, length: int, vocab: int = 23) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(4))


def test_init_is_the_same_on_any_device_and_in_any_layout(tiny: Model) -> None:
    whole = Model(tiny.config)
    whole.init_weights(7)
    with torch.device("meta"):
        deferred = Model(tiny.config)
    deferred.to_empty(device="cpu")
    torch.manual_seed(99)
    deferred.init_weights(7)
    reseeded = Model(tiny.config)
    reseeded.init_weights(8)
    for rank in range(2):
        with torch.device("meta"):
            part = Model(tiny.config)
        part.shard(Axes(tensor=Axis(None, rank, 2)))
        part.to_empty(device="cpu")
        part.init_weights(7)
        for name, parameter in part.named_parameters():
            assert torch.equal(
                parameter, slice_local_shard(part.local_shards[name], whole.get_parameter(name))
            ), name
    changed = 0
    for name, parameter in whole.named_parameters():
        assert parameter.isfinite().all(), name
        assert torch.equal(parameter, deferred.get_parameter(name)), name
        changed += not torch.equal(parameter, reseeded.get_parameter(name))
    assert changed >= len(tiny.config.layers) * 2


@torch.no_grad()
def test_init_is_as_published() -> None:
    """Evo 2: N(0, 2/5D) in, 2/(layers·√D) out; rates and Mamba's constants in their ranges."""
    changes = ["width=640", "pattern='[se, mr, li, attention]'", "operators.attention.heads=5"]
    config = load_model_config("evo2-1b-8k", changes)
    model = Model(config)
    model.init_weights(0)
    width, layers = 640, 4
    parameters = dict(model.named_parameters())
    inner = parameters["blocks.2.mixer.operator.qkv.weight"].std()
    assert float(inner) == pytest.approx(math.sqrt(2 / (5 * width)), rel=0.01)
    embedding = parameters["embedding.weight"].std()
    assert float(embedding) == pytest.approx(math.sqrt(2 / (5 * width)), rel=0.01)
    outer = parameters["blocks.2.mixer.operator.output.weight"].std()
    assert float(outer) == pytest.approx(2 / (layers * math.sqrt(width)), rel=0.01)
    poles = torch.exp(-torch.exp(parameters["blocks.2.mixer.operator.rates"]))
    assert 0.96 < float(poles.min()) < float(poles.max()) < 0.997
    residues = parameters["blocks.2.mixer.operator.residues"].std()
    assert float(residues) == pytest.approx(0.1 / 4, rel=0.03)
    filters = parameters["blocks.1.mixer.operator.taps"].std()
    assert float(filters) == pytest.approx(1e-5 / math.sqrt(8192), rel=0.05)
    short = parameters["blocks.0.mixer.operator.taps"]
    assert float(short.abs().max()) == pytest.approx(3**-0.5, rel=0.02)


@torch.no_grad()
def test_mamba_init_is_as_published() -> None:
    for name in ("mamba-130m", "mamba2-130m"):
        model = Model(load_model_config(name, ["pattern='[mamba] * 2'"]))
        model.init_weights(0)
        operator = model.typed_blocks()[0].mixer.operator
        dt = torch.nn.functional.softplus(operator.get_parameter("dt_bias"))
        assert 1e-3 * 0.999 < float(dt.min()) < 2e-3 and 0.05 < float(dt.max()) < 0.1
        A = torch.exp(operator.get_parameter("A_log"))
        assert float(A.min()) >= 1 and float(A.max()) == pytest.approx(16, abs=2.5)
        out = operator.get_parameter("output.weight")
        assert float(out.abs().max()) == pytest.approx(1536**-0.5 / 2**0.5, rel=0.01)


@torch.no_grad()
def test_gpt2_scales_residual_branches_by_depth() -> None:
    model = Model(load_model_config("gpt2-small", ["pattern='[attention] * 2'"]))
    model.init_weights(0)
    parameters = dict(model.named_parameters())
    assert float(parameters["blocks.0.mlp.operator.down.weight"].std()) == pytest.approx(
        0.01, rel=0.01
    )
    assert float(parameters["blocks.0.mlp.operator.up.weight"].std()) == pytest.approx(
        0.02, rel=0.01
    )
    with pytest.raises(ConfigError, match="1024 rows, and the sequence 1025"):
        model(torch.zeros(1, 1025, dtype=torch.int64))


def test_bf16_is_near_fp32(tiny: Model) -> None:
    model = Model(tiny.config)
    model.init_weights(0)
    model.eval()
    tokens = tokens_of(2, 40)
    documents = Documents.build(torch.tensor([0, 17, 40, 80]), (2, 40))
    with torch.no_grad():
        exact = model(tokens, documents)
        half = model.bfloat16()(tokens, documents)
    assert half.dtype == torch.bfloat16
    # With heads of four channels, products of queries and keys cancel, so the norm of the outputs
    # magnifies the rounding of q, k and v (fla's rule gives the same error); silu would damp it.
    magnifies = any(getattr(o, "gate", None) == "sigmoid" for o in tiny.config.operators.values())
    assert (half.float() - exact).norm() < (0.03 if magnifies else 0.012) * exact.norm()


@pytest.mark.parametrize("mode", ["operator", "block"])
@pytest.mark.parametrize("packed", [False, True])
def test_recompute_changes_nothing(tiny: Model, mode: str, packed: bool) -> None:
    tokens = tokens_of(2, 30)
    cuts = torch.tensor([0, 11, 30, 60])
    documents = Documents.build(cuts, (2, 30)) if packed else None
    parameters = list(tiny.parameters())
    kept = tiny(tokens, documents)
    expected = torch.autograd.grad(kept.square().sum(), parameters)
    tiny.set_recompute(mode)  # type: ignore[arg-type]
    held = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal held
        held += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        logits = tiny(tokens, documents)
    assert torch.equal(logits, kept)
    gradients = torch.autograd.grad(logits.square().sum(), parameters)
    for gradient, plain_gradient in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, plain_gradient)
    tiny.set_recompute("none")
    recomputed, held = held, 0
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        tiny(tokens, documents)
    assert recomputed < held / 2


def test_auxiliary_losses_survive_recompute() -> None:
    moe = {"kind": "moe", "experts": 4, "hidden": 12, "balance_loss": 0.1, "z_loss": 0.01}
    data: dict[str, Any] = {
        "vocab_size": 23,
        "width": 16,
        "pattern": "[moe] * 3",
        "operators": {"moe": moe},
    }
    model = Model(build(ModelConfig, data, source="a test"))
    model.init_weights(0)
    results = []
    for mode in ("none", "operator", "block"):
        model.set_recompute(mode)  # type: ignore[arg-type]
        loss = model.hidden(tokens_of(2, 9))[1].sum()
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.dim() == 2][1:4])
        results.append((loss, *gradients))
    assert float(results[0][0].detach()) > 0.3
    for recomputed in results[1:]:
        for plain_gradient, recomputed_gradient in zip(results[0], recomputed, strict=True):
            assert torch.equal(plain_gradient, recomputed_gradient)
    model.eval()
    assert torch.equal(model.hidden(tokens_of(2, 9))[1], torch.zeros(2))


def test_untied_heads_and_learned_positions() -> None:
    operators = {"a": {"kind": "attention", "heads": 2, "rope": None}}
    data = {
        "vocab_size": 23,
        "width": 16,
        "pattern": "[a]",
        "operators": operators,
        "norm": "layer",
        "learned_positions": 12,
        "tie_embeddings": False,
    }
    model = Model(build(ModelConfig, data, source="a test"))
    model.init_weights(0)
    assert model.head is not None
    logits = model(tokens_of(1, 12))
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    equal_tokens = torch.full((1, 12), 5)
    assert (model(equal_tokens)[0, 0] - model(equal_tokens)[0, 7]).abs().max() > 1e-4


def test_only_plain_torch_needs_packing_layouts(everything: Model) -> None:
    assert everything.packing_chunks(41, torch.device("cpu"))
    assert not everything.packing_chunks(41, torch.device("cuda"))


def test_the_tiny_hybrid_learns_to_copy() -> None:
    """The second half of each row repeats the first, random half."""
    torch.manual_seed(0)
    model = Model(load_model_config("tiny-hybrid", ["vocab_size=16", "width=64"]))
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for step in range(80):
        half = torch.randint(0, 16, (16, 12))
        row = torch.cat([half, half], dim=1)
        weights = torch.zeros(16, 23)
        weights[:, 12:] = 1
        total, weight = cross_entropy(model(row[:, :-1]), row[:, 1:], weights)
        (total / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            assert float(total.detach() / weight) > 2.5
    assert float(total.detach() / weight) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packed", "recompute"),
    [
        pytest.param(False, "none", marks=pytest.mark.long),
        pytest.param(True, "none", marks=pytest.mark.long),  # the next one compiles its code too
        (True, "operator"),
    ],
)
def test_blocks_compile_without_a_graph_break(
    packed: bool, recompute: Recompute, everything: Model
) -> None:
    """Every kind of block, also with packed rows; only FFTs break, as layouts depend on data."""
    tokens = tokens_of(2, 48)
    cuts = torch.tensor([0, 20, 48, 49, 96])
    documents = Documents.build(cuts, (2, 48)) if packed else None
    eager = everything(tokens, documents)
    everything.set_recompute(recompute)
    torch.compiler.reset()
    for block in everything.typed_blocks():
        block.compile(backend="eager", fullgraph=True)
    # torch limits how often the code of a block is compiled.
    with torch._dynamo.config.patch(recompile_limit=64):
        compiled = everything(tokens, documents)
    assert (compiled - eager).abs().max() < 1e-12


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (5,)])
def test_empty_inputs_are_refused(shape: tuple[int, ...], tiny: Model) -> None:
    with pytest.raises(ConfigError, match=r"tokens: are \(.*at least 1 × 1 is needed"):
        tiny(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("cuts", [(1,), (2, 5, 7)])
def test_chunks_one_after_the_other_are_the_whole_model(everything: Model, cuts: Any) -> None:
    """Each chunk has the modules that it uses, under the names of the whole, and no other."""
    tokens = torch.randint(0, 23, (2, 12), generator=torch.Generator().manual_seed(1))
    stream: tuple[torch.Tensor, ...] = ()
    held: list[set[str]] = []
    for chunk in range(len(cuts) + 1):
        part = deepcopy(everything)
        part.keep(cuts, [chunk])
        assert part.stream_tensors(chunk) == len(stream) or chunk == 0
        stream, _ = part.run_chunk(chunk, tokens, stream=stream)
        held.append({name for name, _ in part.named_parameters()})
    assert torch.equal(stream[0], everything.hidden(tokens)[0])
    names = {name for name, _ in everything.named_parameters()}
    assert set().union(*held) == names
    twice = {name for name in names if sum(name in item for item in held) > 1}
    assert {name.split(".")[0] for name in twice} <= {"embedding", "shared"}
    assert "embedding.weight" in held[0] & held[-1], "tied"


def test_layers_share_what_follows_from_positions_and_launch_no_losses(
    tiny_of: Callable[..., Model],
) -> None:
    model = tiny_of("[gqa] * 3")
    tokens = tokens_of(1, 8)
    with mock.patch.object(attention, "rotation", wraps=attention.rotation) as rotation:
        together = model(tokens)
        assert rotation.call_count == 1 < len(model.blocks)
        with mock.patch.object(base, "is_watched", lambda: True):  # each layer by itself
            assert torch.equal(model(tokens), together)
        assert rotation.call_count == 1 + len(model.blocks)
    batch = model.batch_context(tokens, None, None, None)
    [block, *_] = model.typed_blocks()
    assert block(model.embed(tokens, batch).double(), batch)[1] is None
