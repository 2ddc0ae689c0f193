"""`tokenize build --pack`: a dataset and its packed view, by one command that can be repeated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.data.corpora import ONE, snapshot

from headrace.console.errors import StorageError
from headrace.dataplane.datasets import manifest as manifests
from headrace.tokenize.builder.build import BuildConfig
from headrace.tokenize.cli import main
from headrace.tokenize.views import build_packed as building
from headrace.tokenize.views.build_packed import build_packed
from headrace.tokenize.views.pack import PackConfig, pack

L = 64


def config_of(corpus: Path, out: Path, *, splits: dict[str, float] | None = None) -> BuildConfig:
    return BuildConfig(
        inputs=(str(corpus),),
        out=str(out),
        tokenizer="byte",
        slice_size=20_000,
        shard_size=15_000,
        splits=splits or {},
        engine=ONE,
    )


def test_the_view_is_that_of_tokenize_pack(
    tmp_path: Path, corpus: Path, run_build: Callable[..., Path]
) -> None:
    result = build_packed(config_of(corpus, tmp_path / "one"), L, "keep-first")
    assert list(result) == [f"{tmp_path}/one", f"{tmp_path}/one/packed-{L}"]
    base = str(run_build(corpus, out="two"))
    config = PackConfig(
        dataset=base, length=L, out=f"{base}/packed-{L}", long="keep-first", engine=ONE
    )
    pack(config)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")
    before = snapshot(tmp_path / "one")
    build_packed(config_of(corpus, tmp_path / "one"), L, "keep-first")
    assert snapshot(tmp_path / "one") == before
    moved = (tmp_path / "one").rename(tmp_path / "moved")
    assert manifests.load(f"{moved}/packed-{L}") == result[f"{tmp_path}/one/packed-{L}"]


def test_splits_each_have_a_view_that_grows(tmp_path: Path, corpus: Path) -> None:
    first = corpus / "0.jsonl"
    config = config_of(first, tmp_path / "out", splits={"val": 0.1})
    build_packed(config, L)
    result = build_packed(config_of(corpus, tmp_path / "out", splits={"val": 0.1}), L)
    folder = f"{tmp_path}/out"
    assert list(result) == [
        f"{folder}/{name}" for name in ("train", f"train/packed-{L}", "val", f"val/packed-{L}")
    ]
    for name in ("train", "val"):
        held = result[f"{folder}/{name}/packed-{L}"]
        assert len(held.generations) == 2
        counts = [generation.provenance["pack"]["tokens"] for generation in held.generations]
        assert sum(counts) == result[f"{folder}/{name}"].tokens


def test_a_killed_command_is_finished(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(corpus, tmp_path / "one", splits={"val": 0.1})

    def killed(packing: PackConfig) -> None:
        if packing.dataset.endswith("val"):
            raise KeyboardInterrupt
        pack(packing)

    with monkeypatch.context() as patch:
        patch.setattr(building, "pack", killed)
        with pytest.raises(KeyboardInterrupt):
            build_packed(config, L)
    assert not (tmp_path / f"one/val/packed-{L}").exists()
    build_packed(config, L)
    build_packed(config_of(corpus, tmp_path / "two", splits={"val": 0.1}), L)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


def test_another_rule_is_refused_before_the_build(tmp_path: Path, corpus: Path) -> None:
    build_packed(config_of(corpus / "0.jsonl", tmp_path / "out"), L)
    before = snapshot(tmp_path / "out")
    with pytest.raises(StorageError, match="packed to 64 tokens with --long cut"):
        build_packed(config_of(corpus, tmp_path / "out"), L, "drop")
    assert snapshot(tmp_path / "out") == before
    build_packed(config_of(corpus / "0.jsonl", tmp_path / "out"), 2 * L, "drop")
    assert (tmp_path / f"out/packed-{2 * L}/manifest.json").exists()


def test_the_command(tmp_path: Path, corpus: Path) -> None:
    command = ["build", str(corpus), "--tokenizer", "byte", "--workers", "1"]
    command += ["--out", f"{tmp_path}/out"]
    result = CliRunner().invoke(main, [*command, "--pack", "64", "--json"], catch_exceptions=False)
    shown = [load["url"] for load in json.loads(result.stdout)]
    assert shown == [f"{tmp_path}/out", f"{tmp_path}/out/packed-64"]
    result = CliRunner().invoke(main, [*command, "--pack", "64"], catch_exceptions=False)
    assert "bins of 64 tokens" in result.output
    for wrong in (["--pack", "1"], ["--pack-long", "drop"]):
        result = CliRunner().invoke(main, [*command, *wrong])
        assert result.exit_code == 2 and "--pack" in result.output
