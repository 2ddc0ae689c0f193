"""Builds keep their bytes and settings: a setting that is renamed would make every dataset unable
to grow, as would a new one that enters the identity of all builds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.data.corpora import ONE, texts, write_jsonl

from headrace.dataplane.datasets import manifest
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.sources.format import SourceConfig

BUILDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every option": {
        "source": SourceConfig(id_field="name"),
        "shuffle": 3,
        "dedup": "exact",
        "splits": {"val": 0.2},
        "max_document_tokens": 200,
        "on_error": "skip",
    },
    "mds": {"format": "mds", "compression": "zstd"},
}

RECORDED = {
    "plain": (
        "00e45cd1c1d622e87957dd3e91b3dd7a75b53e9bd685798a0bf8ecfbb2451a53",
        "ecb258af9ac1fe3ef2f8b7612574722904bbc540a9ec8b6dc7a3e19103cf4ec7",
    ),
    "every option": (
        "f70dc6644ad6c0fbbdd19c5ab97917f833af266907ae33be1a82e673e777b223",
        "05ca9f96d70f7bef316bfac563c04d6dc3285320aded86d391de333474369429",
    ),
    "mds": (
        "2844a5d375b8134de62d03b9223fd77e6590f661396e54ef4d6ea9471783956b",
        "c8ff2320d1f37ffe54c768c2d3c86c48db8f939d4916e3b6e499b814d26784cf",
    ),
}
"""The hash of the manifest and that of its settings."""


@pytest.mark.parametrize("name", BUILDS)
def test_a_build_keeps_its_hash(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = BUILDS[name]
    monkeypatch.chdir(tmp_path)  # file names are part of a build
    for number, count in enumerate((60, 3, 20)):
        write_jsonl(Path("corpus") / f"{number}.jsonl", texts(count, seed=number))
    config = BuildConfig(
        inputs=("corpus",),
        out="out",
        tokenizer="byte",
        slice_size=8_000,
        shard_size=6_000,
        engine=ONE,
        **options,
    )
    (result, *_) = build(config).values()
    text = json.dumps(result.settings, sort_keys=True)
    assert (result.hash, hashlib.sha256(text.encode()).hexdigest()) == RECORDED[name]
    assert manifest.load("out/train" if "splits" in options else "out") == result
