from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.tokenize.builder import dedup
from headrace.tokenize.builder.settings import BuildJob
from headrace.tokenize.builder.tasks import Task
from headrace.tokenize.sources.format import SourceConfig


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=dedup.DIGEST_BYTES).digest()


@pytest.mark.parametrize("part", [1, 64, 1 << 20])
def test_the_first_of_equal_documents_is_kept(tmp_path: Path, part: int) -> None:
    """The number of bytes sorted at once does not matter."""
    job = BuildJob(
        url=str(tmp_path),
        format="arrow",
        compression=None,
        shard_size=1,
        source=SourceConfig(),
        tokenizer=ByteTokenizer(ByteConfig()).info,
        tokenizer_files={},
    )
    corpus = [["a", "b", "a"], ["c", "b", "old", "d", "a"]]
    tasks = [Task((), f"task{number}") for number in range(2)]
    for task, texts in zip(tasks, corpus, strict=True):
        dedup.write_digests(dedup.digests_url(job, task), b"".join(map(digest, texts)))
    kept = dedup.find_duplicates(job, tasks, [digest("old")], sort_bytes=part)
    assert [drops.tolist() for drops in kept.drops] == [[2], [1, 2, 4]]
    data = b"".join(kept.digests)
    result = {data[k : k + dedup.DIGEST_BYTES] for k in range(0, len(data), dedup.DIGEST_BYTES)}
    assert result == set(map(digest, "abcd"))
