from __future__ import annotations

from pathlib import Path

import pytest
from corpora import texts, write_jsonl

from headrace.console.errors import InputError
from headrace.tokenize.sources import SourceConfig
from headrace.tokenize.train import TrainConfig, sample


def test_a_sample_is_a_repeatable_part_of_the_corpus(tmp_path: Path) -> None:
    documents = texts(500)
    path = write_jsonl(tmp_path / "a.jsonl", documents)

    def taken(size: int) -> list[str]:
        return list(sample(TrainConfig(inputs=(str(path),), out="none", sample_bytes=size)))

    assert taken(1 << 30) == documents
    some = taken(path.stat().st_size // 5)
    assert some == taken(path.stat().st_size // 5)
    assert set(some) < set(documents) and 50 < len(some) < 150


def test_a_bad_record_is_told_with_its_place_and_what_to_do(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one"])
    config = TrainConfig(inputs=(str(path),), out="none", source=SourceConfig(text_field="body"))
    with pytest.raises(InputError, match="no field `body`") as caught:
        list(sample(config))
    assert caught.value.where == f"{path}, line 1"
    assert caught.value.mend is not None
