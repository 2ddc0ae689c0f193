"""Control tags without loss, as in Savanna; and texts that are no sequences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.console.errors import InputError
from headrace.dataplane.datasets import manifest
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.dataplane.tokenizers.tokenizer import Raw

TAG = "|d__Bacteria;p__Pseudomonadota;s__Escherichia coli|"
EOD = 256


def savanna_mask(labels: list[int]) -> list[int]:
    """Its `mask_control_tags` for one row: 0 where there is no loss."""
    mask = [0 if label in (64, 35) else 1 for label in labels]
    cuts = {0, len(labels) - 1}
    cuts |= {k for k, label in enumerate(labels) if label in (124, EOD)}
    start, *rest = sorted(cuts)
    for end in rest:
        if {95, 59, 32} & set(labels[start:end]):
            last = end - 1 if labels[end] == EOD else end
            first = start + 1 if labels[start] == EOD else start
            mask[first : last + 1] = [0] * (last + 1 - first)
        start = end
    return mask


def weights(texts: Any, **options: Any) -> list[list[float]]:
    tokenizer = ByteTokenizer(ByteConfig(**options))
    encoded = tokenizer.encode(texts)
    assert tokenizer.weight_table is not None and encoded.weights is not None
    table = np.array(tokenizer.weight_table)[encoded.weights]
    return [part.tolist() for part in np.split(table, encoded.starts[1:-1])]


@given(st.lists(st.text("ACGTacgt|_; @#d", min_size=1, max_size=30), min_size=1, max_size=4))
def test_control_tags_are_those_of_savanna(texts: list[str]) -> None:
    expected = [savanna_mask([*text.encode(), EOD]) for text in texts]
    assert weights(texts, mask_control_tags=True) == expected
    result = weights(texts, mask_control_tags=True, dna=True, masked_weight=0.25)
    for text, kept, mask in zip(texts, result, expected, strict=True):
        lower = [0.25 if c.islower() else 1.0 for c in text] + [1.0]
        assert kept == [w * m for w, m in zip(lower, mask, strict=True)]


def test_a_tag_has_no_loss_and_keeps_its_ids() -> None:
    text = f"{TAG}ACgt@A#N"
    [result] = weights([text], mask_control_tags=True, dna=True)
    assert result == [0.0] * len(TAG) + [1, 1, 0.1, 0.1, 0, 1, 0, 1, 1]
    [without] = weights([text], dna=True)
    assert without[0] == 1.0 and set(without) == {1.0, 0.1}
    plain, masked = (ByteTokenizer(ByteConfig(mask_control_tags=flag)) for flag in (False, True))
    assert plain.info.fingerprint == masked.info.fingerprint
    assert plain.encode([text]).tokens.tolist() == masked.encode([text]).tokens.tolist()


@given(
    texts=st.lists(st.text("ACNnnN|_", min_size=1, max_size=30), min_size=1, max_size=4),
    length=st.integers(1, 5),
    tags=st.booleans(),
)
def test_runs_of_n_have_no_loss(texts: list[str], length: int, tags: bool) -> None:
    options = {"dna": True, "masked_weight": 0.25, "mask_control_tags": tags}
    result = weights(texts, mask_n_runs=length, **options)
    for text, plain, kept in zip(texts, weights(texts, **options), result, strict=True):
        for run in re.finditer(f"[Nn]{{{length},}}", text):
            plain[run.start() : run.end()] = [0.0] * len(run[0])
        assert kept == plain
    [raw] = weights(Raw(b"ANNn", np.array([4])), dna=True, mask_n_runs=3)
    assert raw == [1.0, 1.0, 1.0, 1.0]  # the last letter is a separator
    assert ByteTokenizer(ByteConfig(dna=True, mask_n_runs=3)).info.spec["mask_n_runs"] == 3
    assert "mask_n_runs" not in ByteTokenizer(ByteConfig(dna=True)).info.spec
    with pytest.raises(ValueError, match="it must be at least 1"):
        ByteConfig(dna=True, mask_n_runs=0)
    with pytest.raises(ValueError, match="mask_n_runs needs dna"):
        ByteConfig(mask_n_runs=3)


def test_the_end_of_a_document_has_full_loss_whatever_separates_documents() -> None:
    """Before, a lower-case separator gave the end token the weight of a masked base."""
    raw = Raw(b"ACxGTx", np.array([3, 6]))
    assert weights(raw, dna=True) == [[1.0] * 3] * 2


PROSE = "It was a bright cold day in April, and the clocks were striking thirteen."


def build(folder: Path, text: str, **options: Any) -> manifest.Manifest:
    from headrace.tokenize.builder.build import BuildConfig
    from headrace.tokenize.builder.build import build as run
    from headrace.tokenize.executors import ExecutorConfig
    from headrace.tokenize.sources.format import SourceConfig

    (folder / "a.txt").write_text(text)
    rest = {name: options.pop(name) for name in ("on_error",) if name in options}
    config = BuildConfig(
        inputs=(str(folder / "a.txt"),),
        out=str(folder / "out"),
        tokenizer="byte",
        byte=ByteConfig(**{"dna": True, **options}),
        source=SourceConfig(text_documents="line"),
        engine=ExecutorConfig(workers=1),
        **rest,
    )
    return run(config)[str(folder / "out")]


@pytest.mark.parametrize("option", ["dna", "mask_control_tags"])
def test_prose_is_not_a_genome(tmp_path: Path, option: str) -> None:
    """Before, it became capitals without a word."""
    text = "ACGTTGCA\n" * 9 + PROSE + "\n" + PROSE
    options = {"dna": False, option: True}
    with pytest.raises(InputError, match=r"44% of its bytes are not of a nucleotide") as caught:
        build(tmp_path, text, **options)
    assert "record 10" in str(caught.value) and "--max-foreign" in str(caught.value)
    result = build(tmp_path, text, on_error="skip", **options)
    assert result.documents == 9
    assert result.generations[0].provenance["counts"]["bad: not tokenizable"] == 2


def test_prose_is_allowed_by_name(tmp_path: Path) -> None:
    assert build(tmp_path, PROSE, max_foreign=1).documents == 1
    with pytest.raises(ValueError, match="max_foreign needs dna"):
        ByteConfig(max_foreign=0.5)


@pytest.mark.parametrize(
    "text",
    [
        "ACGTNNNNacgtryswkmbdhv-.~*UU",
        f"{TAG}ACG",
        f"{TAG}@ACG#{TAG.lower()}T",
        "A" * 91 + "JJJJJJJJJ",
    ],
)
def test_sequences_with_tags_and_some_other_letters_are_genomes(tmp_path: Path, text: str) -> None:
    assert build(tmp_path, text).documents == 1
    assert Dataset(str(tmp_path / "out")).manifest.tokens == len(text) + 1


def test_headers_of_fasta_do_not_count() -> None:
    tokenizer = ByteTokenizer(ByteConfig(dna=True))
    header = ">NC_000913.3 Escherichia coli str. K-12 substr. MG1655, complete genome"
    for text, bad in ((f"{header}\nACGT\n{header}\nACGT", []), ("MKQHKAMIVALIVICITAVV", [0])):
        assert list(tokenizer.find_misfits(tokenizer.encode([text]))) == bad
