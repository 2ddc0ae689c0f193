"""A BPE build of a gigabyte, compared with libraries that only encode.

    python -m benchmarks.long.tokenize_peers       prints one line per program

The corpus is the text of installed packages and of /usr/share: code, pages, documentation, tables,
in mixed order, no file twice. headrace reads JSON lines, checks, hashes, encodes and writes a
dataset; the libraries receive texts that are in memory. All have the same 32k vocabulary with the
pattern of GPT-2. Each program runs in its own process, pinned to one core; the figures are CPU
seconds, with start-up apart: imports, opening the tokenizer and, for headrace, a build of a
megabyte. Bytecode is compiled before, as in an installation. `tokenizers` and tiktoken have no
cache and encode a sixteenth. Programs that are not installed are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.tokenize_bpe import TRAIN_ON, _cpu

GIGABYTE, MEGABYTE = 10**9, 10**6
KINDS = {".py", ".md", ".rst", ".txt", ".pyi", ".h", ".hpp", ".js", ".html", ".xml", ".po", ".json"}
SIZES = range(200, 2 * MEGABYTE)
"""Bytes of a file."""
BATCH_CHARACTERS = 1 << 19
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
Encode = Callable[[list[str]], object]


def write_corpus(path: Path) -> None:
    import tokenizers

    roots = (Path(tokenizers.__file__).parent.parent, Path(os.__file__).parent, Path("/usr/share"))
    files = [file for root in roots for file in sorted(root.rglob("*")) if file.suffix in KINDS]
    random.Random(0).shuffle(files)
    digests, size = set(), 0
    with path.open("w") as out:
        for file in files:
            try:
                if file.is_symlink() or file.stat().st_size not in SIZES:
                    continue
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if digest not in digests:
                digests.add(digest)
                size += out.write(json.dumps({"text": text}) + "\n")
            if size > GIGABYTE:
                return


def build(corpus: str, folder: str, name: str) -> None:
    from headrace.tokenize.builder.build import BuildConfig, build
    from headrace.tokenize.executors import ExecutorConfig

    build(
        BuildConfig(
            inputs=(corpus,),
            out=f"{folder}/{name}",
            tokenizer=f"{folder}/tokenizer.json",
            engine=ExecutorConfig(workers=1),
            rehash=True,
        )
    )


def compile_bytecode(folder: str) -> None:
    build(f"{folder}/start.jsonl", folder, "bytecode")


def headrace(folder: str) -> None:
    build(f"{folder}/start.jsonl", folder, "start")
    started = _cpu()
    build(f"{folder}/corpus.jsonl", folder, "corpus")
    # The second build opens the tokenizer again, as the first one did, from a cache.
    report(started, _cpu() - started, sum(map(text_bytes, lines(folder))))


def fastokens(folder: str) -> None:
    from fastokens import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    encode_all(folder, tokenizer.encode_batch_flat)


def gigatoken(folder: str) -> None:
    from gigatoken import Tokenizer

    tokenizer = Tokenizer(f"{folder}/tokenizer.json").backend
    encode_all(folder, lambda texts: [tokenizer.encode(text) for text in texts])


def tokenizers(folder: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    encode_all(
        folder, lambda texts: tokenizer.encode_batch_fast(texts, add_special_tokens=False), 16
    )


def tiktoken(folder: str) -> None:
    from tiktoken import Encoding

    from headrace.dataplane.tokenizers.fast_bpe import letters_by_byte

    octets = {letter: byte for byte, letter in letters_by_byte().items()}
    vocabulary = json.loads(Path(folder, "tokenizer.json").read_bytes())["model"]["vocab"]
    ranks = {
        bytes(octets[letter] for letter in token): id
        for token, id in vocabulary.items()
        if octets.keys() >= set(token) and token != "<|endoftext|>"
    }
    encoding = Encoding("gpt2-like", pat_str=GPT2, mergeable_ranks=ranks, special_tokens={})
    encode_all(folder, lambda texts: encoding.encode_ordinary_batch(texts, num_threads=1), 16)


PROGRAMS = (headrace, fastokens, gigatoken, tiktoken, tokenizers)


def encode_all(folder: str, encode: Encode, share: int = 1) -> None:
    encode(["start"])
    started, took, size = _cpu(), 0.0, 0
    for number, batch in enumerate(batches(folder)):
        if number % share:
            continue
        began = _cpu()
        encode(batch)
        took += _cpu() - began
        size += sum(len(text.encode()) for text in batch)
    report(started, took, size)


def report(start: float, took: float, size: int) -> None:
    print(json.dumps([start, size / MEGABYTE / took]))


def lines(folder: str) -> Iterator[str]:
    with Path(folder, "corpus.jsonl").open() as file:
        yield from file


def text_bytes(line: str) -> int:
    return len(json.loads(line)["text"].encode())


def batches(folder: str) -> Iterator[list[str]]:
    batch, size = [], 0
    for line in lines(folder):
        batch.append(json.loads(line)["text"])
        size += len(batch[-1])
        if size > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def main() -> None:
    from headrace.tokenize.train import TrainConfig, train

    os.environ |= {"RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    core = str(min(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        corpus, start = Path(folder, "corpus.jsonl"), Path(folder, "start.jsonl")
        write_corpus(corpus)
        with corpus.open() as file:
            start.write_text("".join(file.readlines(MEGABYTE)))
        out = f"{folder}/tokenizer.json"
        train(TrainConfig(inputs=(str(corpus),), out=out, sample_bytes=TRAIN_ON))
        size = corpus.stat().st_size / GIGABYTE
        command = ["taskset", "-c", core, sys.executable, "-m", "benchmarks.long.tokenize_peers"]
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        subprocess.run([*command, compile_bytecode.__name__, folder], check=True)
        speeds: dict[str, float] = {}
        for program in PROGRAMS:
            name = program.__name__
            run = subprocess.run([*command, name, folder], capture_output=True, text=True)
            if run.returncode:
                print(f"{name}: left out: {run.stderr.strip().splitlines()[-1]}")
                continue
            started, speeds[name] = json.loads(run.stdout.splitlines()[-1])
            scope = "whole build" if program is headrace else "encoding alone"
            print(
                f"bpe 32k, {size:.2f} GB, {name}, {scope}: {speeds[name]:.1f} MB per CPU second, "
                f"{speeds[name] / speeds['headrace']:.2f}× of headrace's; start-up {started:.2f} s"
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        programs = (compile_bytecode, *PROGRAMS)
        {program.__name__: program for program in programs}[sys.argv[1]](sys.argv[2])
    else:
        main()
