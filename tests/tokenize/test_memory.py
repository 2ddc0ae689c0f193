"""A worker uses less than 1 GiB of memory, whatever its input."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

LIMIT = 1 << 30
TEXT = Path(__file__).read_text() * 20_000  # about 60 MB


BUILD = """
import atexit, sys
from pathlib import Path
from headrace.tokenize.cli import main

def tell():
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(line for line in lines if line.startswith("VmHWM")), file=sys.stderr)

atexit.register(tell)
main()
"""


def peak(*arguments: object) -> tuple[int, int, str]:
    """Return the exit code, peak memory and stderr of a build. The build reports its own peak: the
    peak seen by the parent would include the parent's memory at the fork."""
    command = [sys.executable, "-c", BUILD, "build", *map(str, arguments), "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    kilobytes = done.stderr.rsplit("VmHWM:", 1)[1].split()[0]
    return done.returncode, int(kilobytes) * 1024, done.stderr


def one_long_line(path: Path) -> None:
    with path.open("w") as out:
        for _ in range(5):
            out.write(TEXT.replace("\n", " "))


def one_long_record(path: Path) -> None:
    with path.open("w") as out:
        out.write(">chromosome\n")
        for _ in range(4_000_000):
            out.write("ACGTNNacgtgg" * 5 + "\n")


def large_documents(path: Path) -> None:
    with gzip.open(path, "wt", compresslevel=1) as out:
        for text in large_texts():
            out.write(json.dumps({"text": text}) + "\n")


def large_rows(path: Path) -> None:
    """Write large rows among many small ones, in one row group."""
    texts = [text for large in large_texts() for text in ["small"] * 500 + [large]]
    pq.write_table(pa.table({"text": texts}), path)


def large_texts() -> list[str]:
    """Return texts near the limit. An emoji makes Python take four bytes for every character."""
    return [f"{TEXT[:size]}🙂" for size in (29_000_000, 10, 30_000_000, 29_000_000, 1_000_000)]


CASES: dict[str, tuple[str, Callable[[Path], None], int, list[str]]] = {
    "refused": ("a.txt", one_long_line, 1, ["--text-documents", "line"]),
    "split": ("a.txt", one_long_line, 0, ["--max-document-tokens", "1000000"]),
    "fasta": ("a.fa", one_long_record, 0, ["--dna", "--max-document-tokens", "100000"]),
    "large": ("a.jsonl.gz", large_documents, 0, ["--shuffle", "1", "--dedup", "exact"]),
    "rows": ("a.parquet", large_rows, 0, []),
    "compressed": ("a.jsonl.gz", large_documents, 0, ["--format", "mds", "--compression", "zstd"]),
}

LONG = dict.fromkeys(("fasta", "compressed"), pytest.mark.long)
"""`split` cuts one line as `fasta` cuts one record; `large` has the documents of `compressed`."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in CASES])
def test_a_worker_uses_less_than_one_gibibyte(tmp_path: Path, name: str) -> None:
    file, write, code, options = CASES[name]
    write(tmp_path / file)
    result = peak(tmp_path / file, "--tokenizer", "byte", "--out", tmp_path / "out", *options)
    assert result[0] == code, result[2]
    assert result[1] < LIMIT
    if code:
        assert "more than 32 MiB" in result[2]
