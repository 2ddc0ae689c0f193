"""Small plans over small datasets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.data.small_data import plan_of

from headrace.dataplane.order.plan import Plan


@pytest.fixture(autouse=True)
def _own_host_files(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give each test a folder of its own for the files that a host keeps: tests with equal data
    would find each other's tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kept")))


@pytest.fixture
def two_phases(dataset: Callable[..., str]) -> Plan:
    """Three sources, replay, a longer sequence in the second phase, more than one epoch."""
    return plan_of(
        {
            "seed": 7,
            "chunk": 1024,
            "window": 4,
            "sources": {
                "web": {"data": dataset("web", count=300), "max_epochs": 3},
                "code": {"data": dataset("code", count=200), "max_epochs": 2},
                "math": {"data": dataset("math", count=100)},
            },
            "phases": {
                "stable": {
                    "tokens": 90_000,
                    "seq_len": 64,
                    "batch": 768,
                    "weights": {"web": 0.7, "code": 0.3},
                },
                "anneal": {
                    "tokens": 30_000,
                    "seq_len": 128,
                    "weights": {"stable": 0.6, "math": 0.4},
                },
            },
        }
    )


@pytest.fixture
def changing(dataset: Callable[..., str]) -> Plan:
    """Four lengths and several epochs: rows of several spans, in which cut epochs end."""
    phases = {"a": (6_000, 16), "b": (6_000, 64), "c": (3_000, 48), "d": (12_000, 32)}
    return plan_of(
        {
            "seed": 2,
            "chunk": 192,
            "window": 8,
            "sources": {
                "web": {"data": dataset("web", count=60), "max_epochs": 3},
                "code": {"data": dataset("code", count=30), "max_epochs": 3},
            },
            "phases": {
                name: {
                    "tokens": tokens,
                    "seq_len": length,
                    "batch": 192,
                    "weights": {"web": 0.7, "code": 0.3},
                }
                for name, (tokens, length) in phases.items()
            },
        }
    )
