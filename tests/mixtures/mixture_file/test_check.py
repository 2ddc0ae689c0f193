"""All problems of a mixture are reported together, with paths and line numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.console.errors import ConfigError
from headrace.mixtures.planning.resolve_mixture import resolve_file


@pytest.fixture
def problems(tmp_path):
    """Return a function that returns the problems of a YAML, as {path: (line, what)}."""

    def ask(text: str, *overrides: str) -> dict[str, tuple[int | None, str]]:
        file = tmp_path / "mixture.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            resolve_file(file, overrides)
        assert str(file) in str(caught.value)
        return {problem.path: (problem.line, problem.message) for problem in caught.value.problems}

    return ask


def test_every_kind_of_problem_is_reported_together(problems, head, tmp_path):
    """One file with every kind of bad input."""
    head("web", 100_000)
    head("alien", 100_000, fingerprint="another")
    head("wide", 100_000, vocab_size=1024)
    head("tiny", 50)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/manifest.json").write_text("{")
    reported = problems(f"""\
sources:
  web: {{data: {tmp_path}/web}}
  again: {{data: {tmp_path}/web/}}
  nowhere: {{data: {tmp_path}/nowhere}}
  broken: {{data: {tmp_path}/broken}}
  alien: {{data: {tmp_path}/alien}}
  wide: {{data: {tmp_path}/wide}}
  tiny: {{data: {tmp_path}/tiny, max_epochs: 0}}
phases:
  negative:
    tokens: 64K
    seq_len: 64
    batch: 1024
    weights: {{web: 1.5, alien: -0.5}}
  zero:
    tokens: 64K
    weights: {{web: 0, wide: 0}}
  empty:
    tokens: 0
    weights: {{}}
  mirror:
    tokens: 64K
    weights: {{web: 0.5, mirror: 0.5}}
  early:
    tokens: 64K
    weights: {{late: 0.5, wbe: 0.3, tiny: 0}}
  late:
    tokens: 100
    weights: {{web: {{from: 1}}}}
    lr: {{shape: wsd, peak: -1}}
""")
    expected = {
        "sources.again.data": (3, "is also the URL of source web"),
        "sources.nowhere.data": (4, "no dataset at"),
        "sources.broken.data": (5, "is not a whole manifest"),
        "sources.alien.data": (6, "was built with another tokenizer"),
        "sources.wide.data": (7, "has a vocabulary of 1,024 ids, but source web has 512"),
        "sources.tiny.max_epochs": (8, "is 0; it must be at least 1"),
        "phases.negative.weights.alien": (14, "is -0.5; a share must be at least 0"),
        "phases.zero.weights": (17, "all shares are 0"),
        "phases.empty.tokens": (19, "is required: the number of tokens"),
        "phases.empty.weights": (20, "is empty"),
        "phases.mirror.weights.mirror": (23, "a phase cannot replay itself"),
        "phases.early.weights.late": (26, "is a later phase"),
        "phases.early.weights.wbe": (26, "there is no such source or earlier phase; did you mean"),
        "phases.early.weights": (26, "the shares sum to 0.8; they must sum to 1"),
        "phases.late.tokens": (28, "100 tokens are less than one step (1,024)"),
        "phases.late.weights.web": (29, "a changing share needs both"),
        "phases.late.lr.peak": (30, "is -1; it must be a finite number of at least 0"),
        "phases.late.lr.decay": (30, "is required by shape wsd"),
    }
    for path, (line, message) in expected.items():
        assert path in reported, path
        assert reported[path][0] == line, path
        assert message in reported[path][1], reported[path][1]
    assert set(reported) == set(expected)


def test_rows_longer_than_a_source_are_reported_with_other_problems(problems, head, tmp_path):
    head("web", 10_000)
    head("tiny", 50)
    reported = problems(f"""\
sources:
  web: {{data: {tmp_path}/web}}
  tiny: {{data: {tmp_path}/tiny}}
  unused: {{data: {tmp_path}/nowhere}}
phases:
  a:
    tokens: 1024
    seq_len: 32
    batch: 64
    weights: {{web: 0.9, tiny: 0.1}}
  b:
    tokens: 1024
    seq_len: 64
    weights: {{a: 1}}
""")
    assert reported["phases.b.seq_len"] == (
        13,
        "a row of 64 tokens is longer than source tiny (50 tokens)",
    )
    assert set(reported) == {"phases.b.seq_len", "sources.unused.data"}


GOOD = """\
sources:
  web: {{data: {0}/web}}
  code: {{data: {0}/code}}
phases:
  stable:
    tokens: 64K
    seq_len: 64
    batch: 1024
    weights: {{web: 0.8, code: 0.2}}
    lr: {{warmup: 1K}}
"""


@pytest.fixture
def good(head, tmp_path) -> str:
    head("web", 100_000)
    head("code", 100_000)
    return GOOD.format(tmp_path)


@pytest.mark.parametrize(
    ("override", "path", "message"),
    [
        ("phases.stable.weights.web=.nan", "phases.stable.weights.web", "is nan"),
        ("phases.stable.weights.web=.inf", "phases.stable.weights.web", "is inf"),
        ("phases.stable.weights.web=0.7", "phases.stable.weights", "sum to 0.9"),
        ("phases.stable.weights.web={from: 0.8, to: 0.9}", "phases.stable.weights", "at the end"),
        ("phases.stable.batch=32", "phases.stable.batch", "shorter than a row of 64 tokens"),
        ("phases.stable.seq_len=0", "phases.stable.seq_len", "is 0; it must be at least 1"),
        ("phases.stable.batch=-5", "phases.stable.batch", "is -5"),
        ("phases.stable.lr.warmup=65K", "phases.stable.lr", "longer than the phase"),
        ("phases.stable.lr.end=0.1", "phases.stable.lr.end", "is not used by shape constant"),
        ("phases.stable.lr={warmup_from: 0.5}", "phases.stable.lr.warmup_from", "needs a `warmup`"),
        ("phases.stable.lr.shape=exponential", "phases.stable.lr.end", "above 0"),
        ("phases.stable.lr={shape: wsd, decay: 0}", "phases.stable.lr.decay", "is 0"),
        (
            "phases.stable.lr={shape: cosine, decay: 9}",
            "phases.stable.lr.decay",
            "is not used by shape cosine",
        ),
        ("phases.stable.lr={decay: 9}", "phases.stable.lr.decay", "is not used by shape constant"),
        ("phases.stable.lr.shape=cosin", "phases.stable.lr.shape", "did you mean `cosine`?"),
        (
            "phases.web={tokens: 2048, weights: {code: 1}}",
            "sources.web",
            "has the same name",
        ),
        (
            "phases.stable.weights={temperature: 2, code: 0.1}",
            "phases.stable.weights.temperature",
            "gives the shares of all sources, and stands alone",
        ),
        (
            "phases.stable.weights={temperature: {from: 1, to: 2}}",
            "phases.stable.weights.temperature",
            "cannot change over a phase",
        ),
        ("chunk=100", "chunk", "is not a multiple of seq_len 64 of phase stable"),
        ("window=0", "window", "it must be at least 1"),
        ("phases.stable.tokens=-5", "phases.stable.tokens", "is -5; it must be at least 1"),
        ("phases.stable.tokens=2_000_000T", "phases.stable.tokens", "less than 1,152,921,504"),
        (
            "sources.web.generations=3",
            "sources.web.generations",
            "is 3, but the dataset has 1",
        ),
        ("sources.web.generations=0", "sources.web.generations", "at least 1"),
        ("sources={}", "sources", "is empty"),
        ("phases={}", "phases", "is empty"),
    ],
)
def test_one_wrong_value(problems, good, override, path, message):
    reported = problems(good, override)
    assert message in reported[path][1], reported


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("phases.stable.wieghts={}", "phases.stable.wieghts"),
        ("phases.stable.weights.web=much", "phases.stable.weights.web"),
        ("phases.stable.weights.web={from: 1, till: 0}", "phases.stable.weights.web"),
        ("phases.stable.lr.shape=cosin", "phases.stable.lr.shape"),
        ("sources.web={}", "sources.web.data"),
    ],
)
def test_wrong_types_and_unknown_keys_are_reported(problems, good, override, path):
    reported = problems(good, override)
    assert any(place.startswith(path) for place in reported), reported


def test_an_overridden_value_has_no_line(problems, good):
    reported = problems(good, "phases.stable.weights.web=-1", "sources.code.max_epochs=0")
    assert {line for line, _ in reported.values()} == {None}


def test_the_source_with_a_minority_tokenizer_is_reported(problems, good, head, tmp_path):
    """Also if it comes first."""
    url = head("alien", 100_000, fingerprint="another")
    reported = problems(f"sources:\n  alien: {{data: {url}}}\n" + good.partition("\n")[2])
    assert set(reported) == {"sources.alien.data"}


def test_one_dataset_under_two_names_is_detected_by_its_hash(problems, good, tmp_path, head):
    # The first generation of a dataset beside the whole dataset: its tokens would be served twice.
    head("web", 5_000)
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror/manifest.json").write_bytes((tmp_path / "web/manifest.json").read_bytes())
    reported = problems(good, f"sources.mirror={{data: {tmp_path}/mirror, generations: 1}}")
    assert reported["sources.mirror.data"][1] == "is the same dataset as source web"


def test_relative_and_absolute_paths_are_the_same_url(problems, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reported = problems(good, "sources.code.data=./web")
    assert reported["sources.code.data"][1] == "is also the URL of source web"


def test_a_plan_that_runs_dry_is_refused_with_row_and_line(tmp_path, good):
    file = tmp_path / "mixture.yaml"
    file.write_text(good.replace("64K", "1M"))
    with pytest.raises(ConfigError) as caught:
        resolve_file(file)
    web, code = map(str, caught.value.problems)
    assert web.startswith("line 6: phases.stable.tokens: web: runs dry at row 1,")
    assert code.startswith("line 6: phases.stable.tokens: code: runs dry at row ")
    assert caught.value.hint


def test_a_mixture_without_problems_is_planned(tmp_path: Path, good: str) -> None:
    file = tmp_path / "mixture.yaml"
    file.write_text(good)
    plan = resolve_file(file, ["phases.stable.tokens=32K"])
    assert plan.phases[0].asked_tokens == 32_000
    assert plan.tokens == 31 * 1024


def test_misspelt_keys_do_not_hide_other_problems(problems, head, tmp_path):
    """Wrong types and wrong values are reported together, without their consequences."""
    head("web", 100_000)
    head("code", 100_000)
    reported = problems(f"""\
sources:
  web: {{data: {tmp_path}/web, max_epoch: 3}}
  code: {{date: {tmp_path}/code}}
  math: {{data: {tmp_path}/nowhere}}
phases:
  first:
    tokens: 64K
    seq_length: 64
    batch: 1024
    weights: {{web: 0.5, cood: 0.5}}
  second:
    tokens: lots
    weights: {{web: 0.5, code: 0.25, first: 0.5}}
    lr: {{peek: 1}}
  third:
    tokens: 64K
    wieghts: {{web: 1}}
  fourth: 64K
  fifth:
    tokens: 64K
    weights: {{fourth: 0.5, third: 0.5, later: 0.5}}
    lr: {{shape: exponential}}
""")
    assert set(reported) == {
        "sources.web.max_epoch",
        "sources.code.data",
        "sources.code.date",
        "sources.math.data",
        "phases.first.seq_length",
        "phases.first.weights.cood",
        "phases.second.tokens",
        "phases.second.weights",
        "phases.second.lr.peek",
        "phases.third.wieghts",
        "phases.fourth",
        "phases.fifth.weights",
        "phases.fifth.weights.later",
        "phases.fifth.lr.end",
    }
    assert reported["phases.second.weights"] == (13, "the shares sum to 1.25; they must sum to 1")
    assert "did you mean `code`" in reported["phases.first.weights.cood"][1]


@pytest.mark.parametrize("section", ["sources", "phases", "after"])
def test_a_misspelt_section_is_the_only_problem_reported(problems, good, section):
    text = (
        good.replace(f"{section}:", f"{section}s:") if section in good else f"{good}\nafterr: 3\n"
    )
    assert len(problems(text)) == 1
