"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from small_data import random_documents, write_dataset

# Nothing depends on how fast the machine is, and a change is judged by the same examples as the
# one before it: `make test-all` draws others.
GENERAL = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("same", **GENERAL, derandomize=True)
settings.register_profile("others", **GENERAL)
settings.load_profile("same")


@pytest.hookimpl(trylast=True)  # when it is known which are run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` gives a half to each of two processes, and who is done takes from the end of what
    the other has left: so that none waits for a long test, each half begins with those."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = [item for item in items if not item.get_closest_marker("slow")]
    a, b = len(slow) // 2, len(items) // 2 - len(slow) // 2
    items[:] = [*slow[:a], *fast[:b], *slow[a:], *fast[b:]]


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., str]:
    """Writes a dataset of random documents; returns its URL."""

    def make(name: str, *, seed: int | None = None, count: int = 100, **options: object) -> str:
        url = str(tmp_path / name)
        number = sum(map(ord, name)) if seed is None else seed
        write_dataset(url, random_documents(number, count), **options)  # type: ignore[arg-type]
        return url

    return make
