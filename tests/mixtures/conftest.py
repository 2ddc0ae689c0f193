"""Datasets without shards, of any size: planning reads only the heads of manifests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.data.plan_data import write_head


@pytest.fixture
def head(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a dataset head into the test's folder and returns its URL."""

    def make(name: str, *tokens: int, **options: object) -> str:
        return write_head(str(tmp_path / name), *tokens, **options)  # type: ignore[arg-type]

    return make
