from __future__ import annotations

import pytest
import torch

from headrace.models.accounting.count import build_meta, forward_flops
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import Fp8Config
from headrace.models.config.options.recompute import Rule, Selective
from headrace.models.transforms.fp8 import iterate_matrices
from headrace.trainer.record.speed import count_speed, device_peak, peak_memory

MODEL = load_model_config("tiny-transformer")
UNITS: tuple[Rule, ...] = ("none", "block")


def test_recomputed_layers_count_in_hfu_alone() -> None:
    plain, again = (
        count_speed(MODEL, [64, 128], rules=(rule,) * len(MODEL.layers), peak=1e12)
        for rule in UNITS
    )
    parts = forward_flops(build_meta(MODEL), 128)
    layers = sum(parts.values()) - parts["head"]
    assert plain.mfu(128, 10) == again.mfu(128, 10) == plain.hfu(128, 10)
    assert again.hfu(128, 10) == pytest.approx((3 * sum(parts.values()) + layers) * 10 / 1e12)
    assert (plain.mfu(64, 10) or 0) < (plain.mfu(128, 10) or 0), "attention grows with the row"


def test_flops_in_fp8_count_half() -> None:
    """An MFU of 1 is the time of each product at the peak of its precision."""
    config = Fp8Config(smallest=64, ends=1)
    result = list(iterate_matrices(build_meta(MODEL), config))
    narrow = sum(item.flops for item in result if item.reason is None)
    total = 3 * sum(forward_flops(build_meta(MODEL), 128).values())
    save: Rule = Selective(save=("matmul",))
    for rule, again in (("none", 0), (save, 0), ("operator", 1)):
        rules: tuple[Rule, ...] = (rule,) * len(MODEL.layers)
        plain, fp8 = (
            count_speed(MODEL, [128], rules=rules, peak=1e12, fp8=item) for item in (None, config)
        )
        assert fp8.mfu(128, 10) == pytest.approx((total - narrow) * 10 / 1e12)
        saved = (plain.hfu(128, 10) or 0) - (fp8.hfu(128, 10) or 0)
        assert saved == pytest.approx((1 + again / 2) * narrow * 10 / 1e12)


def test_without_a_peak_there_is_no_utilisation() -> None:
    speed = count_speed(MODEL, [64], rules=("block",) * len(MODEL.layers), peak=None)
    assert speed.mfu(64, 10) is None and speed.hfu(64, 10) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("a device of next year", None),
    ],
)
def test_the_longest_match_names_the_device(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert device_peak("cuda") == peak
    assert device_peak("cpu") is None


def test_the_memory_of_this_process_is_counted_in_bytes() -> None:
    assert peak_memory("cpu") > 50 << 20
