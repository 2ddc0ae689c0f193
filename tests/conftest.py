"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_data import random_documents, write_dataset


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first: at the end, no process waits for another's last test."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., str]:
    """Writes a dataset of random documents; returns its URL."""

    def make(name: str, *, seed: int | None = None, count: int = 100, **options: object) -> str:
        url = str(tmp_path / name)
        number = sum(map(ord, name)) if seed is None else seed
        write_dataset(url, random_documents(number, count), **options)  # type: ignore[arg-type]
        return url

    return make
