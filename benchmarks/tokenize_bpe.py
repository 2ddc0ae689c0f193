"""Tokenizing JSON lines with a 32k vocabulary, compared with other packages.

    python -m benchmarks.tokenize_bpe           prints one line per package

The corpus is half code, half prose. Each package runs in its own process, pinned to one core. The
figures compare CPU seconds after the imports, child processes included (litdata's worker process
imports again). headrace and a plain loop over `tokenizers` must return the same ids.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

MEGABYTES = 48
TRAIN_ON = 16 << 20
Way = Callable[[str, str, str], None]
BATCH = 1000
PATIENCE = 900
"""Time limit of a package in seconds; on an idle machine each takes less than a minute."""


def write_corpus(path: Path) -> None:
    """Write Python sources, and prose: descriptions and docstrings of installed packages."""
    library = Path(sysconfig.get_paths()["purelib"])
    code = (file.read_text(errors="ignore") for file in sorted(library.rglob("*.py")))
    prose = _prose(library)
    size = {"code": 0, "prose": 0}
    with path.open("w") as out:
        for kind, texts in (("code", code), ("prose", prose)):
            for text in texts:
                if size[kind] > MEGABYTES * 500_000:
                    break
                if text:
                    out.write(json.dumps({"text": text}) + "\n")
                    size[kind] += len(text.encode())
    if min(size.values()) < MEGABYTES * 400_000:
        raise SystemExit(f"the packages in {library} are too small for a corpus; make setup")


def _prose(library: Path) -> Iterator[str]:
    import ast

    for file in sorted(library.glob("*.dist-info/METADATA")):
        yield file.read_text(errors="ignore")
    for file in sorted(library.rglob("*.py"), reverse=True):
        try:
            tree = ast.parse(file.read_text(errors="ignore"))
        except (SyntaxError, ValueError, RecursionError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        parts = [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, kinds)]
        yield "\n\n".join(part for part in parts if part)


def ours(corpus: str, tokenizer: str, out: str) -> None:
    from headrace.tokenize.builder.build import BuildConfig, build
    from headrace.tokenize.executors import ExecutorConfig

    build(
        BuildConfig(
            inputs=(corpus,), out=out, tokenizer=tokenizer, engine=ExecutorConfig(workers=1)
        )
    )


def tokenizers(corpus: str, tokenizer: str, out: str) -> None:
    import numpy as np
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(tokenizer)
    model.encode_special_tokens = True  # encode their names in a text as text, as we do
    end = model.token_to_id("<|endoftext|>")
    digest = hashlib.sha256()
    with Path(corpus).open() as lines, Path(f"{out}.bin").open("wb") as file:
        for texts in _batches(json.loads(line)["text"] for line in lines):
            for encoded in model.encode_batch_fast(texts, add_special_tokens=False):
                data = np.array([*encoded.ids, end], np.uint16).tobytes()
                digest.update(data)
                file.write(data)


def mds_writer(corpus: str, tokenizer: str, out: str) -> None:
    import numpy as np
    from streaming import MDSWriter
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(tokenizer)
    end = model.token_to_id("<|endoftext|>")
    columns = {"tokens": "ndarray:uint16"}
    with (
        Path(corpus).open() as lines,
        MDSWriter(columns=columns, out=out, hashes=["sha256"]) as writer,
    ):
        for texts in _batches(json.loads(line)["text"] for line in lines):
            for encoded in model.encode_batch_fast(texts, add_special_tokens=False):
                writer.write({"tokens": np.array([*encoded.ids, end], np.uint16)})


def litdata(corpus: str, tokenizer: str, out: str) -> None:
    from litdata import TokensLoader, optimize

    optimize(
        fn=_Litdata(tokenizer),
        inputs=[corpus],
        output_dir=out,
        chunk_bytes="64MB",
        item_loader=TokensLoader(),
        num_workers=1,
    )


class _Litdata:
    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = tokenizer

    def __call__(self, corpus: str) -> Iterator[object]:
        import torch
        from tokenizers import Tokenizer

        model = Tokenizer.from_file(self.tokenizer)
        end = model.token_to_id("<|endoftext|>")
        with Path(corpus).open() as lines:
            for texts in _batches(json.loads(line)["text"] for line in lines):
                for encoded in model.encode_batch_fast(texts, add_special_tokens=False):
                    yield torch.tensor([*encoded.ids, end], dtype=torch.int32)


def datatrove(corpus: str, tokenizer: str, out: str) -> None:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.tokens import DocumentTokenizer

    def read(data: object, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        # datatrove's reader does the same, and needs another package.
        with Path(corpus).open() as lines:
            for number, line in enumerate(lines):
                yield Document(text=json.loads(line)["text"], id=str(number))

    LocalPipelineExecutor(
        pipeline=[
            read,
            DocumentTokenizer(
                output_folder=out,
                tokenizer_name_or_path=tokenizer,
                eos_token="<|endoftext|>",
                shuffle_documents=False,
                batch_size=BATCH,
            ),
        ],
        tasks=1,
        logging_dir=f"{out}.logs",
    ).run()


WAYS = (ours, tokenizers, mds_writer, litdata, datatrove)
IMPORTS = {
    # pyarrow imports pandas, if installed, with its first array
    "ours": ("tokenizers", "fastokens", "pandas", "headrace.tokenize.builder.build"),
    "mds_writer": ("tokenizers", "streaming"),
    "litdata": ("tokenizers", "torch", "litdata"),
    "datatrove": ("tokenizers", "datatrove.executor", "datatrove.pipeline.tokens"),
}


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def measure(name: str, folder: str) -> None:
    """Run one package in this process; print its CPU seconds as the last line."""
    for package in IMPORTS.get(name, ("numpy", "tokenizers")):
        importlib.import_module(package)
    began = _cpu()
    way = next(way for way in WAYS if way.__name__ == name)
    way(f"{folder}/corpus.jsonl", f"{folder}/tokenizer.json", f"{folder}/out-{name}")
    print(_cpu() - began)


def _cpu() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    from headrace.tokenize.train import TrainConfig, train

    core = min(os.sched_getaffinity(0))
    os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(corpus)
        train(
            TrainConfig(
                inputs=(str(corpus),), out=f"{folder}/tokenizer.json", sample_bytes=TRAIN_ON
            )
        )
        with corpus.open() as lines:
            size = sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6
        speeds = {
            way.__name__: size / taken for way in WAYS if (taken := seconds(way, folder, core))
        }
        check_ids(folder)
        for name, speed in speeds.items():
            ratio = speed / speeds["tokenizers"]
            print(f"bpe 32k, {name}: {speed:.2f} MB per CPU second, {ratio:.2f}× of tokenizers")


def seconds(way: Way, folder: str, core: int) -> float | None:
    """Return the CPU seconds of a package in its own process; None, and print why, if it fails."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks.tokenize_bpe"]
    try:
        run = subprocess.run(
            [*command, way.__name__, folder], capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        print(f"{way.__name__} did not finish within {PATIENCE} seconds")
        return None
    if run.returncode:
        print(f"{way.__name__} failed: {run.stderr.strip().splitlines()[-1]}")
        return None
    return float(run.stdout.split()[-1])


def check_ids(folder: str) -> None:
    """Raise unless headrace wrote the same ids as `tokenizers`."""
    import numpy as np

    from headrace.dataplane.datasets.dataset import Dataset

    theirs = np.fromfile(f"{folder}/out-tokenizers.bin", np.uint16)
    dataset = Dataset(f"{folder}/out-ours")
    ids = np.empty(dataset.manifest.tokens, np.uint16)
    dataset.fill(0, ids)
    if not np.array_equal(ids, theirs):
        raise SystemExit("headrace and tokenizers returned different ids")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(*sys.argv[1:])
    else:
        main()
