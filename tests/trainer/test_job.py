"""What a run is made of, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.console.errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    LayoutError,
    PlanError,
    RunError,
    StorageError,
)
from headrace.trainer import describe, job, start
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.folder import RunFolder, differences
from headrace.trainer.job import Job
from headrace.trainer.request import Request, Start

TINY = str(Path(__file__).with_name("tiny.yaml"))


@pytest.fixture
def ask(tmp_path: Path) -> Any:
    def ask(*overrides: str, out: Path | None = None, **more: Any) -> Job:
        words = ["synthetic.steps=6", "synthetic.batch_rows=4", "synthetic.seq_len=16"]
        out = out or tmp_path / "run"
        return job.resolve(
            Request(**{"model": TINY, "out": str(out), "overrides": [*words, *overrides], **more})
        )

    return ask


def saved(found: Job) -> Job:
    found.folder.prepare()
    found.save()
    return found


def test_everything_is_resolved_and_comes_back_the_same(ask: Any) -> None:
    first = saved(ask("optimizer.lr=1e-2", "processes=2"))
    assert (first.run.precision, first.run.device, first.run.processes) == ("fp32", "cpu", 2)
    assert first.threads >= 1
    again = job.load(first.folder)
    assert (again.run, again.model, again.plan.hash) == (first.run, first.model, first.plan.hash)
    assert ask("optimizer.lr=1e-2", "processes=2").run == first.run


def test_threads_follow_the_processes_of_each_start(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "threads_for", lambda processes: 8 // processes)
    first = saved(ask("processes=2"))
    assert first.threads == 4
    assert job.load(first.folder, ["processes=8"]).threads == 1
    assert job.load(first.folder, ["processes=8", "threads=3"]).threads == 3


def test_under_another_launcher_its_number_of_processes_counts(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = saved(ask("processes=2"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert job.load(first.folder).processes == 4  # what is in the folder is of the start before
    for start_it in (lambda: ask("processes=2"), lambda: job.load(first.folder, ["processes=2"])):
        with pytest.raises(LayoutError, match="processes=2, and the launcher"):
            start_it()
    assert ask("processes=4").processes == ask().processes == 4


def test_another_run_does_not_take_over_the_folder(ask: Any) -> None:
    saved(ask("optimizer.lr=1e-2"))
    with pytest.raises(RunError, match="holds another run") as caught:
        ask("optimizer.lr=1e-3", "model.width=48", "seed=9")
    for line in ("optimizer.lr: 0.01 there, 0.001 here", "model.width: 36 there", "seed: 1 there"):
        assert line in str(caught.value)


def test_the_layout_may_change(ask: Any) -> None:
    saved(ask("processes=2"))
    found = ask("processes=4", "engine.zero=3", "checkpoints.every=7", "micro_batch_tokens=16")
    assert found.dp == 4 and found.run.checkpoints.every == 7


def test_a_resume_may_take_another_engine(ask: Any) -> None:
    """The folder says every option of the engine that it was begun with."""
    folder = saved(ask("engine.kind=fsdp2", "engine.reshard=false")).folder
    assert job.load(folder, ["engine.kind=deepspeed"]).run.engine == DeepSpeedConfig()
    changed = job.load(folder, ["engine.kind=deepspeed", "engine.zero=3"])
    assert changed.run.engine == DeepSpeedConfig(zero=3)
    with pytest.raises(ConfigError, match="shard"):
        job.load(folder, ["engine.kind=deepspeed", "engine.shard=2"])


def test_a_changed_mixture_is_named() -> None:
    before = {"phases": {"stable": {"weights": {"web": 0.7, "code": 0.3}}}}
    after = {"phases": {"stable": {"weights": {"web": 0.6, "code": 0.3, "new": 0.1}}}}
    assert differences(before, after, "mixture") == [
        "mixture.phases.stable.weights.web: 0.7 there, 0.6 here",
        "mixture.phases.stable.weights.new: None there, 0.1 here",
    ]


def test_a_folder_with_other_things_is_left_alone(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "cat.jpg").touch()
    with pytest.raises(RunError, match=r"holds other things \(cat\.jpg\)"):
        ask()


def test_what_died_before_it_began_can_be_started_again(ask: Any, tmp_path: Path) -> None:
    """`prepare` and half of `save` have happened; run.yaml, which makes it a run, is not there."""
    first = saved(ask())
    first.folder.run.unlink()
    for name in (".probe-0123abcd", ".run.yaml.0123abcd.tmp"):
        (first.folder.root / name).touch()
    (first.folder.root / ".lock").touch()
    assert saved(ask()).plan.hash == first.plan.hash
    first.folder.run.unlink()
    (first.folder.checkpoints / "step-00000002").mkdir()
    with pytest.raises(RunError, match=r"holds other things \(checkpoints\)"):
        ask()


def test_a_later_rank_does_not_stumble_over_what_the_first_has_written(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.yaml.part").touch()
    monkeypatch.setenv("RANK", "1")
    assert not ask().folder.begun
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RunError, match="holds other things"):
        ask()


def test_a_folder_that_cannot_be_written_to(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write to the run's folder"):
        ask(out=tmp_path / "file" / "run").folder.prepare()


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked():  # noqa: SIM117
        with pytest.raises(BusyError, match=r"in use by process \d+"), folder.locked():
            pass
    with folder.locked():
        pass


def test_layouts_that_do_not_fit(ask: Any) -> None:
    with pytest.raises(LayoutError, match="updates on 4 rows, fewer than the 5"):
        start.check(ask("processes=5"))
    with pytest.raises(LayoutError, match="does not divide 1 process"):
        start.check(ask("layout.tp=2"))
    with pytest.raises(LayoutError, match="does not divide the 4"):
        start.check(ask("processes=4", "engine.kind=fsdp2", "engine.shard=3"))
    start.check(ask("processes=4", "engine.kind=fsdp2", "engine.shard=2"))
    with pytest.raises(LayoutError, match="gradients of bf16 in bf16") as caught:
        start.check(ask("engine.zero=0", "precision=bf16"))
    assert caught.value.mend is not None and "engine.zero=1" in caught.value.mend
    start.check(ask("engine.zero=0", "precision=fp32"))


def test_a_vocabulary_that_the_model_does_not_have(ask: Any) -> None:
    from dataclasses import replace

    found = ask()
    with pytest.raises(PlanError, match="has 50 ids, the model embeds 37"):
        start.check(replace(found, plan=replace(found.plan, vocab_size=50)))


def test_rows_longer_than_the_table_of_positions(ask: Any) -> None:
    start.check(ask("model.learned_positions=16"))
    with pytest.raises(PlanError, match="rows of 16 tokens, and the model's table") as caught:
        start.check(ask("model.learned_positions=8"))
    assert caught.value.mend is not None and "learned_positions=16" in caught.value.mend


def test_a_disk_without_room_for_a_checkpoint(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    found = ask()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(StorageError, match="one checkpoint takes"):
        start.start(found, Start())
    assert not found.folder.root.exists()
    with pytest.raises(StorageError, match="1B free, and one checkpoint takes"):
        job.check_disk(found)


def test_wrong_keys_are_reported_together(ask: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ask("optimiser.lr=1", "checkpoints.evry=2", "engine.zero=4")
    for word in ("optimiser", "evry", "zero"):
        assert word in str(caught.value)


def test_a_mixture_that_is_not_there_cannot_be_changed(ask: Any) -> None:
    with pytest.raises(ConfigError, match=r"mixture\.seed.*there is no mixture") as caught:
        ask("mixture.seed=2", "mixture.phases.a.tokens=1M")
    assert "mixture.phases.a.tokens" in str(caught.value)


def test_a_run_needs_rows_of_one_kind(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="needs rows"):
        job.resolve(Request(model=TINY, out=str(tmp_path / "run")))
    with pytest.raises(RunError, match="not both"):
        words = ["synthetic.steps=2"]
        job.resolve(Request(model=TINY, out=str(tmp_path), mixture="m.yaml", overrides=words))


def test_the_description_adds_up(ask: Any) -> None:
    found = ask("processes=2", "micro_batch_tokens=16", "checkpoints.every=4", "engine.zero=1")
    about = describe.describe(found)
    (phase,) = about["batch"]
    assert (phase["micro_batches"], phase["micro_batch_rows"]) == (2, 1)
    count = about["model"]["parameters"]
    assert about["memory"] == {
        "weights": 4 * count,
        "gradients": 4 * count,
        "masters": 2 * count,
        "moments": 4 * count,
    }
    assert about["checkpoints"] == {"bytes": 12 * count, "saved": 2}
    more = describe.describe(found, activations=True)
    assert more["memory"]["activations"] > 0 and more["memory"]["logits"] >= 16 * 37 * 4
    assert "activations" in "\n".join(describe.lines(more))
    assert "  checkpoints:\n    every: 4\n" in describe.configuration(more)
    written = "\n".join(describe.lines(about))
    assert "dp 2 × tp 1 × cp 1" in written
    assert "2 of 1.49GB each" in "\n".join(
        describe.lines({**about, "checkpoints": {"bytes": 1_490_000_000, "saved": 2}})
    )


def test_a_run_takes_a_step_at_least() -> None:
    from click.testing import CliRunner

    from headrace.trainer.cli import main

    for command in (["run"], ["resume", "nowhere"]):
        result = CliRunner().invoke(main, [*command, "--stop-after", "0"])
        assert result.exit_code == 2 and "x>=1" in result.output


def test_the_model_is_that_of_the_weights_and_every_shape_is_compared(
    ask: Any, checkpoint_of: Any, tmp_path: Path
) -> None:
    from headrace.models.config import load_model_config
    from headrace.models.model import Model

    model = Model(load_model_config("tiny-transformer"))
    run = checkpoint_of(model, 3)
    found = ask(f"init_from.path={run.root}", model=None, out=tmp_path / "new")
    assert found.model == model.config and found.run.init_from.step == 3, "pinned"
    start.check(found)
    other = ask(f"init_from.path={run.root}", out=tmp_path / "new")
    with pytest.raises(CheckpointError, match="of another model") as caught:
        start.check(other)
    assert "norm.weight: [128] there, [36] here" in str(caught.value)
