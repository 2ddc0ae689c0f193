"""Every shipped configuration has the published number of parameters, exactly."""

import pytest

from headrace.models.accounting.count import build_meta, count_parameters, count_parameters_by_part
from headrace.models.config.config import list_shipped_models, load_model_config

PUBLISHED = {
    "evo2-1b-8k": 1_107_989_760,
    "evo2-7b-8k": 6_481_059_584,
    "evo2-7b-1m": 6_581_722_880,
    "evo2-7b-262k": 6_481_059_584,
    "evo2-20b-1m": 19_738_780_160,
    "evo2-40b-8k": 40_331_142_144,
    "evo2-40b-1m": 41_117_574_144,
    "evo1-7b": 6_452_781_056,
    "zamba-7b": 7_232_490_496,
    "zamba2-1.2b": 1_215_064_704,
    "zamba2-2.7b": 2_662_214_560,
    "zamba2-7b": 7_356_749_648,
    "mamba-130m": 129_135_360,
    "mamba-370m": 371_516_416,
    "mamba-790m": 793_204_224,
    "mamba-1.4b": 1_372_178_432,
    "mamba-2.8b": 2_768_345_600,
    "mamba2-130m": 128_989_632,
    "mamba2-370m": 368_346_624,
    "mamba2-780m": 780_161_280,
    "mamba2-1.3b": 1_343_757_312,
    "mamba2-2.7b": 2_702_599_680,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-34b": 33_743_970_304,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "mamba-hybrid-9.8b": 9_780_235_392,
    "gpt2-small": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "olmo-hybrid-7b": 7_430_870_688,  # transformers' class with its defaults
    "nemotron-3-nano-30b": 31_577_940_288,  # the same, with its buffers of the balancing bias
}
NOT_COUNTED = {
    "stripedhyena-7b", "blackmamba-1.5b", "hybrid-50m", "hybrid-1b", "transformer-1b",
    "gdn-hybrid-1b", "transformer-1m", "mamba2-hybrid-1m", "gdn-hybrid-1m", "hyena-hybrid-1m",
    "kda-mla-1m", "tiny-deepseek", "tiny-delta", "tiny-hybrid", "tiny-mamba", "tiny-moe",
    "tiny-transformer", "tiny-zamba",
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_equal_published_ones(name: str) -> None:
    assert count_parameters(build_meta(load_model_config(name))) == PUBLISHED[name]


def test_every_shipped_model_is_listed_here() -> None:
    assert set(list_shipped_models()) == set(PUBLISHED) | NOT_COUNTED


@pytest.mark.parametrize("name", sorted(NOT_COUNTED))
def test_parts_add_up(name: str) -> None:
    model = build_meta(load_model_config(name))
    assert sum(count_parameters_by_part(model).values()) == count_parameters(model)
