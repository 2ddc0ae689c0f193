import pytest

from headrace.console.errors import LayoutError
from headrace.trainer.layout import LayoutConfig


@pytest.mark.parametrize(("axis", "word"), [("tp", "tensor"), ("cp", "context")])
def test_what_is_not_there_is_refused_in_words(axis: str, word: str) -> None:
    with pytest.raises(LayoutError, match=f"{word} parallelism yet") as caught:
        LayoutConfig(**{axis: 2}).data_parallel(4)
    assert caught.value.mend is not None and "engine.zero=3" in caught.value.mend


def test_data_parallelism_takes_all_processes() -> None:
    assert LayoutConfig().data_parallel(6) == 6
    with pytest.raises(ValueError, match="tp must be at least 1"):
        LayoutConfig(tp=0)
