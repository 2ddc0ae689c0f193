from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data.corpora import ONE, texts, write_jsonl

from headrace.tokenize.builder.build import BuildConfig, build


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own cache of file hashes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Four files of JSON lines, one of them large enough for several slices."""
    folder = tmp_path / "corpus"
    for number, count in enumerate((200, 3, 40, 1)):
        write_jsonl(folder / f"{number}.jsonl", texts(count, seed=number))
    return folder


@pytest.fixture
def run_build(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that builds a dataset with small slices and shards."""

    def run(*inputs: str | Path, out: str = "out", **options: Any) -> Path:
        values: dict[str, Any] = {
            "tokenizer": "byte",
            "slice_size": 20_000,
            "shard_size": 15_000,
            "engine": ONE,
        }
        config = BuildConfig(
            inputs=tuple(map(str, inputs)), out=str(tmp_path / out), **{**values, **options}
        )
        build(config)
        return tmp_path / out

    return run
