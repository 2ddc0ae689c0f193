"""Datasets that are only heads: planning reads nothing else, so they may be of any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plan_data import write_head


@pytest.fixture
def head(tmp_path: Path) -> Callable[..., str]:
    """Writes the head of a dataset below the test's folder; returns its URL."""

    def make(name: str, *tokens: int, **options: object) -> str:
        return write_head(str(tmp_path / name), *tokens, **options)  # type: ignore[arg-type]

    return make
