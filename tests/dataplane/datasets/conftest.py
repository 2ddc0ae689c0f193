"""A remote dataset with small chunks."""

import os

import pytest
from support.data.small_data import random_documents, write_dataset

from headrace.dataplane.datasets import cache as caching
from headrace.dataplane.datasets import chunks
from headrace.dataplane.datasets import shard_file as shard_files
from headrace.dataplane.loader import gather, prefetch


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of 4 KB, so that small datasets have many."""
    for module in (chunks, caching, gather, prefetch, shard_files):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4096)
    return 4096


@pytest.fixture
def remote(small_chunks: int) -> str:
    url = f"memory://bucket-{os.urandom(4).hex()}/web"
    write_dataset(url, random_documents(5, 400))
    return url
