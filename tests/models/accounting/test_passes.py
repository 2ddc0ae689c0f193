"""Memory of the parts of a model on a GPU or on ranks, traced without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.models.accounting import passes
from headrace.models.accounting.fake.model import FakeModel
from headrace.models.accounting.fake.trace import StorageMeter
from headrace.models.accounting.hops import lengthen_ring
from headrace.models.accounting.layer_kinds import reduce_to_kinds
from headrace.models.accounting.passes import Tracer, model_passes
from headrace.models.accounting.pieces import Passes, find_peak
from headrace.models.accounting.shape import Shape
from headrace.models.accounting.state import Degrees
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.options import OPTIONS
from headrace.models.config.options.attention import AttentionOptions
from headrace.models.config.options.base import FusedOptions
from headrace.models.config.options.hyena_li import HyenaLIOptions
from headrace.models.config.options.names import AttentionForm
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.config.options.recompute import Rule, Selective


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_both_forms_of_context_attention_keep_as_much_and_the_ring_works_with_more() -> None:
    """The ring runs flash attention hop by hop, and sums outputs and gradients in fp32."""
    config = load_model_config("tiny-transformer")
    result = {}
    forms: tuple[AttentionForm, AttentionForm] = ("a2a", "ring")
    for attention in forms:
        shape = Shape(
            rows=1, seq_len=512, precision=PRECISIONS["bf16"], device="cuda",
            degrees=Degrees(cp=4), attention=attention,
        )  # fmt: skip
        result[attention] = model_passes(config, shape, ["none"] * len(config.layers)).layers[0]
    a2a, ring = (result[form] for form in forms)
    assert ring.activations == pytest.approx(a2a.activations, rel=0.1)
    ring_peak, a2a_peak = (sum(piece.high for piece in item.backward) for item in (ring, a2a))
    assert ring_peak > 1.05 * a2a_peak


@pytest.mark.parametrize(("device", "window"), [("cpu", None), ("cuda", 24)])
def test_the_ring_is_traced_and_grows_with_the_row(device: str, window: int | None) -> None:
    """Scores live tile by tile, so the memory of attention is linear in the row."""
    config = ModelConfig(
        vocab_size=64,
        width=32,
        pattern="[attention]",
        operators={"attention": AttentionOptions(heads=2, window=window)},
    )
    shape = Shape(
        rows=1,
        seq_len=128,
        precision=PRECISIONS["bf16"],
        device=device,
        degrees=Degrees(cp=2),
        attention="ring",
    )
    kept = [
        model_passes(config, replace(shape, seq_len=length), ["none"]).layers[0].activations
        for length in (128, 256, 512)
    ]
    short, middle, long = kept
    assert 0 < middle - short < short
    assert long - middle == 2 * (middle - short)


def test_a_gpu_is_traced_with_the_kernels_that_it_would_take() -> None:
    """`auto` is traced as `triton` where kernels can do the work, and as plain torch where they
    cannot: filters with complex poles."""
    config = load_model_config("tiny-hybrid")
    shape = Shape(rows=1, seq_len=256, precision=PRECISIONS["bf16"], device="cuda")
    rules: list[Rule] = ["none"] * len(config.layers)
    explicit = {
        name: replace(options, kernel="triton") if isinstance(options, FusedOptions) else options
        for name, options in config.operators.items()
    }
    fused = replace(config, operators=explicit, kernel="triton")
    result = model_passes(config, shape, rules)
    assert result == model_passes(fused, shape, rules)
    assert result != model_passes(config, replace(shape, device="cpu"), rules)
    li = HyenaLIOptions(state_size=4, poles="complex")
    poles = ModelConfig(vocab_size=64, width=32, pattern="[li]", operators={"li": li})
    long = replace(shape, seq_len=4096)
    [complex_poles] = model_passes(poles, long, ["none"]).layers
    [plain] = model_passes(replace(poles, kernel="torch"), long, ["none"]).layers
    assert complex_poles.activations == pytest.approx(plain.activations, rel=0.2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny-hybrid", [{"attention": "ring"}, {"hyena_li": "a2a"}]),
        ("tiny-moe", [{"degrees": Degrees(dp=2, cp=2, ep=2)}]),
    ],
)
def test_layouts_share_the_traces_of_parts_that_they_do_not_change(
    name: str,
    changes: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each layout is traced anew, and parts of one key are equal."""
    config = load_model_config(name)
    shape = Shape(
        rows=2,
        seq_len=256,
        precision=PRECISIONS["bf16"],
        device="cuda",
        degrees=Degrees(dp=2, cp=2),
    )
    result: list[dict[str, Passes]] = []
    for number, change in enumerate([{}, *changes]):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))
        monkeypatch.setattr(passes, "_traced_passes", {})
        tracer = Tracer(config, replace(shape, **change))
        tracer.trace_model(["none"] * len(config.layers))
        result.append(dict(passes._traced_passes))
    base, *changed = result
    for parts in changed:
        shared = base.keys() & parts.keys()
        assert {part: parts[part] for part in shared} == {part: base[part] for part in shared}
        assert len(base) > len(shared) > 2, "some layers are shared, and some are not"
        unshared = [parts[part] for part in parts.keys() - shared]
        assert not any(item in base.values() for item in unshared)


def test_many_short_rows_take_the_memory_of_few_long_ones() -> None:
    config = load_model_config("tiny-transformer")

    def highest(rows: int, seq_len: int, **limits: int) -> int:
        shape = Shape(rows=rows, seq_len=seq_len, precision=PRECISIONS["bf16"], device="cuda")
        return find_peak(Tracer(config, shape, **limits).layer(0, "none").backward)

    assert highest(48, 8) == pytest.approx(highest(3, 128), rel=0.01)
    # Negative control: the gradient of a weight is the highest moment of two or three short rows.
    assert highest(48, 8, max_rows=3) < 0.9 * highest(3, 128)


def test_each_layer_needs_a_rule() -> None:
    config = load_model_config("tiny-transformer")
    shape = Shape(rows=1, seq_len=64, precision=PRECISIONS["bf16"], device="cuda")
    for number in (-1, 1):
        with pytest.raises(ValueError, match="argument"):
            Tracer(config, shape).trace_model(["none"] * (len(config.layers) + number))


def test_a_second_trace_of_a_ring_equals_the_first() -> None:
    """The tables of a ring, which its calls share, are in neither of them."""
    config = load_model_config("tiny-transformer")
    shape = Shape(
        rows=2,
        seq_len=512,
        precision=PRECISIONS["bf16"],
        device="cuda",
        degrees=Degrees(cp=4),
        attention="ring",
    )
    first, second, third = (
        FakeModel(reduce_to_kinds(config), item).run(lambda model: model.layer(0, "block"))
        for item in (shape, shape, replace(shape, rows=3))
    )
    assert first == second
    assert first != third


def test_a_long_ring_follows_from_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_model_config("tiny-transformer")
    shape = Shape(
        rows=2,
        seq_len=64 * 16,
        precision=PRECISIONS["bf16"],
        device="cuda",
        degrees=Degrees(cp=16),
        attention="ring",
    )
    rules: list[Rule] = ["none", "block", Selective(save=("attention",))]
    result = [Tracer(config, shape).layer(0, rule) for rule in rules]
    monkeypatch.setattr(passes, "_traced_passes", {})
    monkeypatch.setattr(passes, "load_or_compute_passes", lambda _, make: make())
    assert result == [Tracer(config, shape, max_ring=16).layer(0, rule) for rule in rules]
    # Negative control: a short ring with shorter parts.
    for part in (64, 32):
        few = replace(shape, seq_len=part * 8, degrees=Degrees(cp=8))
        model = FakeModel(reduce_to_kinds(config), few)
        short_ring = model.run(lambda model: model.layer(0, rules[-1], hops=True))
        assert (lengthen_ring(short_ring, 8) == result[-1]) == (part == 64)


OPERATORS: dict[str, dict[str, Any]] = {
    "attention": {"heads": 4},
    "delta": {"heads": 2, "key_head_dim": 16, "value_head_dim": 16},
    "glu": {"hidden": 64},
    "hyena-li": {},
    "hyena-li-factored": {},
    "hyena-li-freeform": {},
    "hyena-li-s4d": {},
    "hyena-mlp": {"hidden": 64, "groups": 8},
    "hyena-mr": {"groups": 8},
    "hyena-se": {"groups": 8},
    "mamba1": {},
    "mamba2": {"state_size": 8, "head_dim": 16},
    "mla": {
        "heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "mlp": {"hidden": 64},
    "moe": {"experts": 4, "hidden": 64},
}


@pytest.mark.parametrize("kind", OPERATORS)
def test_operators_that_step_through_rows_say_so(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only they are extrapolated: the others take as many operations for any row."""
    options = OPTIONS[kind](**OPERATORS[kind])
    config = ModelConfig(vocab_size=64, width=64, pattern="[it]", operators={"it": options})
    count, run = 0, StorageMeter.__torch_dispatch__

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return run(*arguments)

    monkeypatch.setattr(StorageMeter, "__torch_dispatch__", counted)
    numbers = []
    for length in (256, 512):  # short rows may take other methods
        count = 0
        shape = Shape(rows=1, seq_len=length, precision=PRECISIONS["fp32"], device="cpu")
        Tracer(config, shape).layer(0, "none")
        numbers.append(count)
    assert numbers[0] > 50
    assert (numbers[1] > numbers[0]) == options.steps("cpu")


def test_operators_with_and_without_steps_are_all_of_them() -> None:
    assert {*OPERATORS} == {*OPTIONS} - {"zamba-block"}


@pytest.mark.parametrize(("kind", "attention"), [("attention", "ring"), ("hyena-li", "a2a")])
def test_long_rows_follow_from_shorter_ones(
    kind: str, attention: AttentionForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring whose chunks have less than a tile of queries holds scores that grow with the square
    of the length, and the filter's highest level is of another operation in short rows."""
    operators = {"it": OPTIONS[kind](**OPERATORS[kind])}
    config = ModelConfig(vocab_size=64, width=64, pattern="[it]", operators=operators)
    shape = Shape(
        rows=1, seq_len=4096, precision=PRECISIONS["fp32"], device="cpu",
        degrees=Degrees(cp=2), attention=attention,
    )  # fmt: skip

    def highest(lengths: list[int] | None) -> list[int]:
        """Return the highest levels of both passes."""
        tracer = Tracer(config, shape, max_length=2048)
        if lengths:
            monkeypatch.setattr(tracer, "_lengths", lambda _=(): lengths)
        layer = tracer.layer(0, "block")
        return [find_peak(layer.forward), find_peak(layer.backward)]

    result, ran, wrong = (highest(lengths) for lengths in (None, [shape.seq_len], [256, 512]))
    assert result == pytest.approx(ran, rel=0.02)
    assert wrong != pytest.approx(ran, rel=0.05)
