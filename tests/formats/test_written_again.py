"""Each committed file is read and written again by the product: the bytes are equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from formats.samples import RENEW, SAMPLES, WORLD, as_text, compare

from headrace.console import config as reader
from headrace.dataplane.datasets import about as abouts
from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.order.fair.slow_jobs import SlowTable
from headrace.dataplane.order.kept_tables import load_tables
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.simulation import Segment, simulate
from headrace.dataplane.order.tables import Tables
from headrace.dataplane.runlog import ledger, writer
from headrace.dataplane.runlog.writer import LineWriter
from headrace.dataplane.storage import host_files
from headrace.dataplane.storage.sealed import seal, unseal
from headrace.mixtures.mixture_file.mixture import Mixture
from headrace.models.accounting import stored as traces
from headrace.models.config.config import ModelConfig
from headrace.planner.hardware.file import HardwareFile
from headrace.planner.tune.folder import TuneFolder
from headrace.reports.anneal.folder import AnnealFolder, Entry
from headrace.tokenize.builder.task_state import TaskState
from headrace.tokenize.neardup import results
from headrace.trainer.accounting import measured
from headrace.trainer.checkpoints import store
from headrace.trainer.run import config as run_config
from headrace.trainer.run.layout_plan import LayoutPlan

Again = Callable[[Path, Path], None]
"""Reads the first file as commands do, and writes it as the second one."""

CHECKPOINT = "main/checkpoints/step-00000008"


def dataset_manifest(sample: Path, again: Path) -> None:
    manifests.save(str(again.parent), manifests.load(str(sample.parent)))


def shard_table(sample: Path, again: Path) -> None:
    url = sample.parent.parent
    for generation in manifests.load(str(url)).generations:
        if generation.table.endswith(sample.name):
            shards = manifests.load_table(str(url), generation)
            manifests.write_generation(str(again.parent.parent), shards)


def dataset_card(sample: Path, again: Path) -> None:
    result = abouts.load(str(sample.parent))
    assert result is not None
    abouts.save(str(again.parent), result)


def near_duplicates(sample: Path, again: Path) -> None:
    result = results.load(f"{str(sample.parent).removesuffix('.neardup')}.parquet")
    assert result is not None
    results.save(f"{str(again.parent).removesuffix('.neardup')}.parquet", result)


def plan(sample: Path, again: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "cwd", lambda: Path("/world"))
        Plan.load(sample).save(again)


def lines(sample: Path, again: Path) -> None:
    written = LineWriter(again)
    for entry in writer.read(sample):
        written.write(entry)
    written.close()


def ledger_lines(sample: Path, again: Path) -> None:
    steps = [entry["step"] for entry in writer.read(sample)]
    parts = []
    for step in steps:
        entry = ledger.find_entries(sample, step)[1]
        assert entry is not None
        ledger.begin(again, entry)
        parts.append(again.read_bytes())
    again.write_bytes(b"".join(parts))


def checkpoint(sample: Path, again: Path) -> None:
    """Commit the files of the checkpoint again: its manifest and its state are equal."""
    source = sample.parent
    held, state = store.read_checkpoint(source)
    store.verify(source, held.files)
    temporary = again.parent.parent / "temporary"
    shutil.copytree(source, temporary)
    texts = {store.MODEL: (source / store.MODEL).read_text()}
    tensors = [file for file in held.files if "/" in file.name]
    store.commit(temporary, again.parent.parent / "step-00000008-again", tensors, state, texts)
    (again.parent.parent / "step-00000008-again" / sample.name).rename(again)


def sealed_document(indent: int | None) -> Again:
    def write(sample: Path, again: Path) -> None:
        again.write_bytes(seal(unseal(str(sample), sample.read_bytes(), hint=""), indent=indent))

    return write


def anneal_request(sample: Path, again: Path) -> None:
    request = AnnealFolder(sample.parent).read()
    runs = [asdict(Entry(**entry)) for entry in request.pop("runs")]
    AnnealFolder(again.parent).store(request, runs=runs)


def measured_numbers(sample: Path, again: Path) -> None:
    measured.write(again, measured.read(sample))


def tune_result(sample: Path, again: Path) -> None:
    name, there, here = (
        sample.stem,
        TuneFolder(sample.parent.parent),
        TuneFolder(again.parent.parent),
    )
    result = there.once(name, lambda place: pytest.fail(f"{place} has a stored result"))
    here.once(name, lambda place: result)


def task_state(sample: Path, again: Path) -> None:
    url = str(sample.parents[2])
    names = json.loads(sample.read_text())["outputs"]
    TaskState.load(url, sample.stem, list(names)).save(str(again.parents[2]), sample.stem)


def yaml_of(kind: type) -> Again:
    def write(sample: Path, again: Path) -> None:
        again.write_text(reader.dump(reader.load(kind, sample)))

    return write


def mixture_yaml(sample: Path, again: Path) -> None:
    """A run keeps the mixture as its author wrote it: with the keys that are there."""
    reader.load(Mixture, sample)
    again.write_text(reader.dump(reader.read_yaml(sample)[0]))


def run_yaml(sample: Path, again: Path) -> None:
    again.write_text(reader.dump(run_config.load(sample)))


FORMATS: dict[str, Again] = {
    "corpora/*/*/manifest.json": dataset_manifest,
    "corpora/*/manifest.json": dataset_manifest,
    "views/*/manifest.json": dataset_manifest,
    "corpora/*/*/tables/*.arrow": shard_table,
    "corpora/*/tables/*.arrow": shard_table,
    "views/*/tables/*.arrow": shard_table,
    "corpora/web/train/about.json": dataset_card,
    "drop.neardup/neardup.json": near_duplicates,
    "plan.json": plan,
    "changing.json": plan,
    "main/plan.json": plan,
    "main/held-out-*.json": plan,
    "main/*.jsonl": lines,
    "main/ledger.jsonl": ledger_lines,
    f"{CHECKPOINT}/manifest.json": checkpoint,
    f"{CHECKPOINT}/state.json": checkpoint,
    "main/about.json": sealed_document(None),
    "anneal/anneal.json": anneal_request,
    "anneal/scores.json": sealed_document(1),
    "main/run.yaml": run_yaml,
    "anneal/settings.yaml": run_yaml,
    "main/model.yaml": yaml_of(ModelConfig),
    "main/mixture.yaml": mixture_yaml,
}
"""Files of the world, and how each is read and written again."""

WRITTEN: dict[str, Again] = {
    "layout.yaml": yaml_of(LayoutPlan),
    "hardware.yaml": yaml_of(HardwareFile),
    "run/measured.json": measured_numbers,
    "tune/results/00-0.json": tune_result,
    "build/work/tasks/0.json": task_state,
}
"""Files that take long to make, or that a build removes. Their samples are renewed by writing them
again: a person adds the keys that are new."""


@pytest.mark.parametrize("pattern", FORMATS)
def test_a_file_of_the_world_is_written_again(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(WORLD)
    samples = sorted(WORLD.glob(pattern))
    assert samples, f"no sample of {pattern}"
    for sample in samples:
        if sample.name != "ledger.jsonl" or pattern.endswith("ledger.jsonl"):
            check(sample, FORMATS[pattern], tmp_path / sample.relative_to(WORLD))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_is_written_again(name: str, tmp_path: Path) -> None:
    check(SAMPLES / "files" / name, WRITTEN[name], tmp_path / name)


def check(sample: Path, write: Again, again: Path) -> None:
    again.parent.mkdir(parents=True, exist_ok=True)
    write(sample, again)
    if RENEW:
        shutil.copyfile(again, sample)
    assert again.read_bytes() == sample.read_bytes(), sample


def test_tables_of_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of an order holds arrays by name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_tables("plan", lambda: simulate([Segment(300, (5, 2, 1), 8)])[0], Tables)
    data = (host_files.folder() / "plan.tables").read_bytes()
    begin = data.index(b"[[")
    compare("keys/order-tables.json", as_text(json.loads(data[begin : data.index(b"\0", begin)])))


def test_jobs_of_a_fair_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [field.name for field in fields(SlowTable)]
    compare("keys/order-slow-jobs.json", as_text(names))


def test_traces_are_stored_by_their_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    traces.load_or_compute("how many?", lambda: [1, 2.5, "words"])
    [file] = traces.cache_folder().iterdir()
    digest, text = file.read_text().split("\n")
    assert len(digest) == 64 and json.loads(text) == [1, 2.5, "words"]
