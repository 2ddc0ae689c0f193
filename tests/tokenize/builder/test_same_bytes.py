"""Builds without the newer options keep the bytes that they had before those options existed.

A task's id hashes its settings, and the manifest's hash covers the ids of tasks: a new setting that
enters the identity of a build would make every dataset unable to grow.
"""

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
        "16ea1b85805b795f8c30d08216f17cf3551bd72de89ece7164c5b2cfca9b05a5",
        "9fa8584ca50d37a5fc5f965781d622156bc9736805f788471650884d1bdb9e8f",
    ),
    "every option": (
        "5c780578ecfc34b68a3cc11297b4617063382026796b6e93dd137ce882516d60",
        "6d80c182e8649e53e2a14bdfe01219c89fb3863182706422a0e350b7e0706301",
    ),
    "mds": (
        "951dd37a45d3c9c55cba10fff28493266024b1d9ba4e8f447bfea02a7a76a7ab",
        "806f89a82d46a740ac3f8957c65e39e044e18d0554a76419bc4a3f598acea61d",
    ),
}
"""The hash of the manifest and that of its settings, before metadata, drops and filters existed."""


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
    (made, *_) = build(config).values()
    text = json.dumps(made.settings, sort_keys=True)
    assert (made.hash, hashlib.sha256(text.encode()).hexdigest()) == RECORDED[name]
    assert manifest.load("out/train" if "splits" in options else "out") == made
