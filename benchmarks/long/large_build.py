"""A build of gigabytes by the two-pass shuffle: memory, bytes read and written, time; and kills.

The corpus is made of words, so that its tokens as bytes take twice its size. A first line builds it
with two workers. The second one does the same with a fortieth of it, ends all processes of the
command by SIGKILL once in each pass, and compares every file of the dataset with that of a build
that was not killed.

    python -m benchmarks.long.large_build         3.2 GB of tokens; needs 15 GB of disk, in TMPDIR
    python -m benchmarks.long.large_build 1       1 GB; at least
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.dataplane.datasets import manifest

GB, MI = 10**9, 1 << 20
TOKENS = 3.2
"""Gigabytes of tokens."""
SMALLER = 40
FILES = 24
PASSES = {"tokenizing": "*/spills/*", "shuffling": "shards/*"}
"""The files that a pass writes, by its name."""


def write_corpus(folder: Path, size: float) -> None:
    """Write FILES files with `size` bytes of text; each is a task of the first pass."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 9))) for _ in range(3000)]
    texts = [" ".join(rng.choices(words, k=rng.randint(10, 600))) for _ in range(4000)]
    folder.mkdir()
    number, remaining = 0, size
    while remaining > 0:
        with (folder / f"{number:09}.jsonl").open("w") as out:
            while remaining > 0 and out.tell() < size / FILES:
                text = f"{number} {rng.choice(texts)}"
                out.write(json.dumps({"text": text}) + "\n")
                number, remaining = number + 1, remaining - len(text)


def command(corpus: Path, out: Path, memory: int) -> list[str]:
    sizes = ["--shuffle-memory", str(memory), "--shard-size", str(memory // 16)]
    return [
        *(str(Path(sys.executable).parent / "tokenize"), "build", str(corpus), "--out", str(out)),
        *("--tokenizer", "byte", "--shuffle", "1", "--workers", "2", *sizes),
    ]


def report_build(folder: Path, tokens: float) -> None:
    corpus, out, memory = folder / "corpus", folder / "out", 1 << 30
    write_corpus(corpus, tokens * GB / 2)
    # What ended children have read and written counts as their parent's.
    before, cpu, start = transferred(), cpu_seconds(), time.perf_counter()
    process = subprocess.Popen(command(corpus, out, memory), stdout=subprocess.DEVNULL)
    largest, all_together = 0, 0
    while process.poll() is None:
        sizes = [private_bytes(number) for number in family(process.pid)]
        largest, all_together = (
            max(largest, *sizes, 0),
            max(all_together, sum(sizes)),
        )
        time.sleep(0.1)
    assert process.returncode == 0
    clock, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    read, written, to_disk = (
        after - earlier for after, earlier in zip(transferred(), before, strict=True)
    )
    stored = 2 * manifest.load(str(out)).tokens
    print(
        f"{stored / GB:.2f} GB of tokens through buckets, memory {memory // MI} MiB a worker, 2 "
        f"workers: at most {largest / MI:.0f} MiB in a process and {all_together / MI:.0f} "
        f"in all; {read / stored:.2f} of the tokens' bytes read, {written / stored:.2f} written "
        f"({to_disk / stored:.2f} to the disk); {clock:.0f} s, {cpu:.0f} s of CPU",
        flush=True,
    )
    shutil.rmtree(corpus)
    shutil.rmtree(out)


def report_kills(folder: Path, tokens: float) -> None:
    corpus, memory = folder / "corpus", 16 * MI
    write_corpus(corpus, tokens * GB / 2)
    whole, killed = folder / "whole", folder / "killed"
    subprocess.run(command(corpus, whole, memory), stderr=subprocess.DEVNULL, check=True)
    for files in PASSES.values():
        kill_after(files, killed, command(corpus, killed, memory))
    subprocess.run(command(corpus, killed, memory), stderr=subprocess.DEVNULL, check=True)
    expected, result = hashes(whole), hashes(killed)
    equal_share = sum(result.get(name) == digest for name, digest in expected.items()) / len(
        expected
    )
    print(
        f"{tokens:.2f} GB of tokens, killed by SIGKILL while {' and while '.join(PASSES)}: "
        f"{equal_share:.0%} of the {len(expected)} files are those of a build without kills"
    )
    assert expected == result


def kill_after(files: str, out: Path, words: list[str]) -> None:
    """Kill a command with all its processes when it has written some files of a pass."""
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        while len(list(out.glob(files))) < 4:
            assert process.poll() is None, f"the build ended before it wrote 4 of {files}"
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (out / "manifest.json").exists()


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


def transferred() -> tuple[int, int, int]:
    """Return the bytes that this process and its ended children have read, written, and written to
    a disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(count) for name, count in (line.split(": ") for line in lines)}
    return counts["rchar"], counts["wchar"], counts["write_bytes"]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def family(number: int) -> Iterator[int]:
    """Yield a process and all those that it has started."""
    yield number
    try:
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    except OSError:  # it has ended
        return
    for child in children:
        yield from family(int(child))


def private_bytes(number: int) -> int:
    """Return the memory of a process that is no mapped file; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{number}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def main(tokens: float = TOKENS) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report_build(Path(folder), tokens)
        report_kills(Path(folder), tokens / SMALLER)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
