from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.data.corpora import write_jsonl

from headrace.dataplane.datasets import manifest
from headrace.dataplane.tokenizers import Raw
from headrace.tokenize.corpus.documents import SpecialNameCounter
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]


def raw(lines: list[str]) -> Raw:
    data = "".join(f"{line}\n" for line in lines).encode()
    return Raw(data, np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1)


@pytest.mark.parametrize("kind", [list, raw])
def test_texts_with_names_of_special_tokens_are_counted(
    kind: Callable[[list[str]], list[str]],
) -> None:
    bars = "|" * 600  # so many that the name is searched for at once
    lines = ["a<|end|>b", "<|", "<|end", "<|x|><|x|>", "plain", "é <|end|>", f"|end|>{bars}"]
    assert len(SpecialNameCounter(["<|end|>", "<|x|>"]).find(kind(lines))) == 3
    assert len(SpecialNameCounter(["</s>", "<|end|>", "plain"]).find(kind(lines))) == 3
    assert len(SpecialNameCounter(["<|nowhere|>"]).find(kind(lines))) == 0
    assert len(SpecialNameCounter([]).find(kind(lines))) == 0
    assert len(SpecialNameCounter(["<|end|>"]).find(kind([f"{bars}<|end|>", f"{bars}<"]))) == 1


def test_the_manifest_counts_bad_and_special_records(tmp_path: Path, run_build: Run) -> None:
    """Counts of bad records, empty documents and texts with names of special tokens."""
    path = write_jsonl(tmp_path / "c" / "a.jsonl", ["one <|endoftext|>", "", "two"])
    with path.open("a") as file:
        file.write("{\n")
    (tmp_path / "c" / "b.jsonl").touch()
    out = run_build(tmp_path / "c", on_error="skip", source=SourceConfig())
    result = manifest.load(str(out)).generations[0]
    assert result.provenance["counts"] == {
        "bad: broken JSON": 1,
        "documents read": 2,
        "empty documents": 1,
        "files without documents": 1,
        "texts that name special tokens": 1,
    }
    assert result.provenance["problems"][0].startswith(f"{path}, line 4: broken JSON")
    assert result.provenance["notes"] == [f"{path}, record 1: names special tokens: <|endoftext|>"]
    assert result.tokens == len("one <|endoftext|>") + 1 + len("two") + 1
