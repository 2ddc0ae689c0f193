"""Flip bits in each file that a later command reads: an error names the file, or the file is made
again. docs/files.md lists these files with their checks; the ones marked ✓ are flipped here."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.data.corpora import ONE, texts, write_jsonl
from support.data.small_data import plan_of

from headrace.console.errors import UserError
from headrace.dataplane import tokenizers
from headrace.dataplane.datasets import about as abouts
from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.datasets.about import About
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.order.kept_tables import load_tables
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.simulation import Segment, simulate
from headrace.dataplane.order.tables import Tables
from headrace.dataplane.runlog import ledger
from headrace.dataplane.runlog import writer as lines
from headrace.dataplane.runlog.ledger import LedgerEntry
from headrace.dataplane.runlog.writer import LineWriter
from headrace.dataplane.storage import host_files, storage
from headrace.dataplane.storage.sealed import seal
from headrace.dataplane.storage.verified import read_named
from headrace.mixtures.search import measured as rankings
from headrace.models.accounting import stored as traces
from headrace.planner.tune.folder import TuneFolder
from headrace.planner.tune.trial import TrialResult
from headrace.reports.report.reading.chunks import chunks, count_lines
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.corpus.drop_files import read_lists
from headrace.tokenize.corpus.inputs import find_files
from headrace.tokenize.files import file_hashes
from headrace.tokenize.files.file_hashes import hash_files
from headrace.tokenize.neardup import results
from headrace.tokenize.neardup.find import NeardupConfig, find_neardups
from headrace.tokenize.sources.fields import KeptField
from headrace.tokenize.sources.format import SourceConfig
from headrace.tokenize.train import TrainConfig, train
from headrace.tokenize.views.pack import PackConfig, pack
from headrace.tokenize.views.select import SelectConfig, select
from headrace.trainer.accounting import measured
from headrace.trainer.folders.request_folder import RequestFolder

FLIPS = 40
"""Bits of a file that are flipped, one after another."""
REMADE = ("hashes of inputs", "tables of a plan", "traces")
"""Files that are made again in place of an error."""


CURVES = ("step", "loss", "tokens")


class Case(NamedTuple):
    file: Path
    read: Callable[[], Any]
    """Reads the file as a command does; its result is compared."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A corpus with copies, a dataset of it, views, a search for near-duplicates and a plan."""
    root = tmp_path_factory.mktemp("flips")
    documents = texts(40)
    corpus = str(write_jsonl(root / "corpus.jsonl", [*documents, *documents[:5]]))
    tokenizer, url = str(root / "bpe.json"), str(root / "dataset")
    train(TrainConfig(inputs=(corpus,), out=tokenizer, vocab_size=300))
    source = SourceConfig(keep=(KeptField(name="text", type="string"),))
    build(
        BuildConfig(
            inputs=(corpus,), out=url, tokenizer=tokenizer, source=source, dedup="exact", engine=ONE
        )
    )
    abouts.save(url, About(licenses=("MIT",)))
    select(SelectConfig(dataset=url, where="document < 9", out=str(root / "view"), engine=ONE))
    pack(PackConfig(dataset=url, length=64, out=str(root / "packed"), engine=ONE))
    find_neardups(NeardupConfig(inputs=(corpus,), out=str(root / "drop.parquet"), engine=ONE))
    phase = {"tokens": 512, "seq_len": 32, "batch": 64, "weights": {"web": 1.0}}
    plan_of({"seed": 1, "sources": {"web": {"data": url}}, "phases": {"one": phase}}).save(
        root / "plan.json"
    )
    yield root
    shutil.rmtree(root)


def of_dataset(work: Path, url: str, name: str, read: Callable[[Dataset], Any]) -> Case:
    return Case(work / url / name, lambda: read(Dataset(str(work / url))))


def written_lines(file: Path, entries: Iterable[Mapping[str, Any]]) -> Path:
    writer = LineWriter(file)
    for entry in entries:
        writer.write(dict(entry))
    writer.close()
    return file


def curves(file: Path) -> Any:
    """Return the curves of the first 8 of 9 lines: a kill may cut off a last line."""
    return [
        chunk[name].tolist()[:8] for chunk in chunks(file, count_lines(file)[1]) for name in CURVES
    ]


def whole(dataset: Dataset) -> Any:
    fields = [(name, value) for shard in dataset.shards for name, value in vars_of(shard)]
    return [fields, dataset.shards.block_starts]


def vars_of(shard: Any) -> Any:
    return [(name, getattr(shard, name)) for name in shard.__dataclass_fields__]


def case_of(kind: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    held = manifests.load(str(work / "dataset"))
    (output,) = held.generations
    (shard,) = manifests.load_table(str(work / "dataset"), output)
    drop = str(work / "drop.parquet")
    if kind == "manifest":
        return of_dataset(work, "dataset", "manifest.json", lambda opened: opened.manifest)
    if kind == "shard table":
        return of_dataset(work, "dataset", output.table, whole)
    if kind in ("list of inputs", "digests"):
        provenance = output.provenance
        name = provenance["inputs"]["name"] if kind != "digests" else provenance["digests"][0]
        return of_dataset(work, "dataset", name, lambda opened: read_named(opened.url, name))
    if kind == "tokenizer":
        name = held.tokenizer.spec["file"]
        return of_dataset(
            work,
            "dataset",
            name,
            lambda opened: tokenizers.load(opened.manifest.tokenizer, opened.url).info,
        )
    if kind == "fields":
        name = shard.details["fields"]["name"]
        return of_dataset(work, "dataset", name, lambda opened: opened.fields(0, 40))
    if kind == "shard":
        return of_dataset(
            work,
            "dataset",
            shard.name,
            lambda opened: opened.open_shard(0).file.read(0, shard.size).tobytes(),
        )
    if kind == "about":
        url = str(work / "dataset")
        return Case(work / "dataset/about.json", lambda: abouts.load(url))
    if kind in ("bits", "pieces"):
        url = "view" if kind == "bits" else "packed"
        (file,) = (work / url / "views").iterdir()
        return of_dataset(
            work, url, f"views/{file.name}", lambda opened: opened.documents(0, opened.tokens)
        )
    if kind == "drop list":
        return Case(Path(drop), lambda: repr(read_lists([drop])))
    if kind == "neardup.json":
        return Case(work / "drop.neardup/neardup.json", lambda: results.load(drop))
    if kind == "clusters":
        search_result = results.load_required(drop)
        return Case(
            work / "drop.neardup" / search_result.files["clusters"],
            lambda: results.read_table(drop, search_result, "clusters").to_pylist(),
        )
    if kind == "plan":
        return Case(work / "plan.json", lambda: Plan.load(work / "plan.json"))
    if kind == "ledger":
        entries = [LedgerEntry(n, 8 * n, 8, f"{n:032x}") for n in range(9)]
        file = written_lines(tmp_path / "ledger.jsonl", map(vars, entries))

        def proved() -> None:
            if (why := ledger.find_gap(file, entries[-1])) is not None:
                raise UserError(f"{file} {why}")

        return Case(file, proved)
    if kind == "evaluations":
        losses = ({"step": n, "sources": {"web": {"loss": 1 / (n + 1)}}} for n in range(9))
        file = written_lines(tmp_path / "evaluations.jsonl", losses)
        return Case(
            file, lambda: [(line["step"], line["sources"]) for line in lines.read(file)][:8]
        )
    if kind == "metrics":
        steps = ({"step": n, "loss": 1 / (n + 1), "tokens": 64 * n} for n in range(9))
        file = written_lines(tmp_path / "metrics.jsonl", steps)
        return Case(file, lambda: curves(file))
    if kind == "request":
        folder = RequestFolder(tmp_path, "anneal", ())
        folder.store({"seed": 1}, runs=[1, 2])
        return Case(folder.request, folder.read)
    if kind == "result of a trial":
        tune, result = TuneFolder(tmp_path), TrialResult(outcome="measured", seconds=1.25)
        tune.once("00-0", lambda place: result)
        return Case(tune.results / "00-0.json", lambda: tune.once("00-0", lambda place: result))
    if kind == "ranking":
        file = tmp_path / "scores.json"
        shares = [{"web": n / 8, "code": 1 - n / 8} for n in range(6)]
        candidates = [
            {"name": f"c{n}", "score": 1.5 + n, "error": None, "shares": share}
            for n, share in enumerate(shares)
        ]
        storage.write(str(file), seal({"weights": {"web": 1.0}, "candidates": candidates}))
        return Case(file, lambda: repr(rankings.load_scores([str(tmp_path)])))
    if kind == "measured":
        measured.write(tmp_path / "measured.json", {"phases": [{"measured": 1.25}]})
        return Case(tmp_path / "measured.json", lambda: measured.read(tmp_path / "measured.json"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if kind == "hashes of inputs":
        monkeypatch.setattr(file_hashes, "MIN_CACHED_BYTES", 0)
        files = find_files([str(work / "corpus.jsonl")], SourceConfig())
        hash_files(files)
        return Case(file_hashes.cache_file(), lambda: hash_files(files).files)
    if kind == "tables of a plan":
        segments = [Segment(300, (5, 2, 1), 8)]

        def tables() -> Any:
            saved_tables = load_tables("plan", lambda: simulate(segments)[0], Tables)
            return {name: array.tolist() for name, array in saved_tables.arrays.items()}

        tables()
        return Case(host_files.folder() / "plan.tables", tables)
    assert kind == "traces"

    def answer() -> Any:
        return traces.load_or_compute("how many?", lambda: [1, 2, 3.5, "words"])

    answer()
    (file,) = traces.cache_folder().iterdir()
    return Case(file, answer)


KINDS = [
    *("manifest", "shard table", "list of inputs", "digests", "tokenizer", "shard", "fields"),
    *("about", "bits", "pieces", "drop list", "neardup.json", "clusters"),
    *("plan", "ledger", "evaluations", "metrics"),
    *("request", "result of a trial", "ranking", "measured"),
    *("hashes of inputs", "tables of a plan", "traces"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_an_error_that_names_the_file_or_changes_nothing(
    kind: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = case_of(kind, work, tmp_path, monkeypatch)
    data, sound = file.read_bytes(), read()
    chance, errors = random.Random(0), 0
    places = [(at, chance.randrange(8)) for at in chance.choices(range(len(data)), k=FLIPS)]
    for at, bit in places:
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        try:
            assert read() == sound, f"bit {bit} of byte {at}"
        except UserError as error:
            errors += 1
            assert file.name in str(error), error
    file.write_bytes(data)
    assert read() == sound
    if kind in REMADE:
        assert not errors
    else:
        assert errors > FLIPS / 2
