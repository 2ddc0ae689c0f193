"""Fill-in-the-middle: which documents are rearranged, into which ids, and how they are counted."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.data.corpora import read_dataset, snapshot, texts, write_jsonl

from headrace.console.errors import MisuseError, StorageError
from headrace.dataplane.datasets import manifest
from headrace.dataplane.tokenizers import Tokenizer, marks
from headrace.dataplane.tokenizers.bpe import BpeConfig, BpeTokenizer
from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.tokenize.builder.build import BuildConfig
from headrace.tokenize.builder.fim import FimConfig, Rearrangement, check_tokenizer
from headrace.tokenize.cli import main
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.train import TrainConfig, train

Run = Callable[..., Path]
END = "<|endoftext|>"
NAMES = ("<PRE>", "<SUF>", "<MID>", "<EOT>")
SPECIAL = (END, *NAMES)
BYTES = ByteConfig(special_tokens=SPECIAL)
HALF = FimConfig(rate=0.5, sentinels=NAMES)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    path = write_jsonl(folder / "a.jsonl", texts(50))
    out = folder / "tokenizer.json"
    train(TrainConfig(inputs=(str(path),), out=str(out), vocab_size=320, special_tokens=SPECIAL))
    return out


@pytest.fixture(scope="module")
def tokenizers(bpe: Path) -> dict[str, Tokenizer]:
    return {
        "byte": ByteTokenizer(BYTES),
        "bpe": BpeTokenizer(bpe.read_bytes(), BpeConfig(), source=str(bpe)),
    }


def naive(text: str, config: FimConfig, encode: Callable[[str], list[int]], ids: dict[str, int]):
    """The rule as the page states it, one document at a time."""
    key = config.seed.to_bytes(16, "little", signed=True)
    drawn = hashlib.blake2b(text.encode(), digest_size=32, key=key, person=b"fim").digest()
    chosen, order, first_draw, second_draw = (
        int.from_bytes(drawn[8 * k : 8 * k + 8], "little") for k in range(4)
    )
    if chosen / 2**64 >= config.rate or len(text) < 3:
        return [*encode(text), ids[END]]
    low, high = sorted(
        (first_draw * (len(text) + 1) // 2**64, second_draw * (len(text) + 1) // 2**64)
    )
    prefix, middle, suffix = encode(text[:low]), encode(text[low:high]), encode(text[high:])
    pre, suf, mid, *eot = (ids[name] for name in config.sentinels)
    if order / 2**64 < config.spm:
        return [pre, suf, *suffix, mid, *prefix, *middle, *eot, ids[END]]
    return [pre, *prefix, suf, *suffix, mid, *middle, *eot, ids[END]]


def rearranged(tokenizer: Tokenizer, config: FimConfig, words: Sequence[str]) -> list[list[int]]:
    encoded = marks.encode(tokenizer, *Rearrangement(config, tokenizer.special).rearrange(words))
    bounds = encoded.starts.tolist()
    return [encoded.tokens[a:b].tolist() for a, b in pairwise(bounds)]


def inverted(text: str) -> str:
    """Return the document that a rearranged one, shown with its sentinels, was made of."""
    if not text.startswith("<PRE>"):
        return text
    first, rest = text.removeprefix("<PRE>").removesuffix("<EOT>").split("<SUF>")
    suffix, last = rest.split("<MID>")
    return first + last + suffix  # PSM: prefix, middle; SPM: nothing, prefix and middle


WORDS = st.lists(st.text(max_size=40) | st.text("ACGTacgt", max_size=40), min_size=1, max_size=5)
CONFIGS = st.builds(
    FimConfig,
    rate=st.sampled_from([0.3, 1.0]),
    spm=st.sampled_from([0.0, 0.5, 1.0]),
    sentinels=st.sampled_from([NAMES, NAMES[:3]]),
    seed=st.integers(-3, 3),
)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@given(WORDS, CONFIGS)
def test_the_ids_are_those_of_the_naive_rule_and_can_be_inverted(
    kind: str, tokenizers: dict[str, Tokenizer], words: list[str], config: FimConfig
) -> None:
    tokenizer = tokenizers[kind]
    ids = {name: token.id for name, token in tokenizer.special.items()}

    def encode(text: str) -> list[int]:
        return tokenizer.encode([text]).tokens[:-1].tolist() if text else []

    result = rearranged(tokenizer, config, words)
    assert result == [naive(word, config, encode, ids) for word in words]
    for word, document in zip(words, result, strict=True):
        if not any(name in word for name in SPECIAL) and "\0" not in word:
            shown = tokenizer.decode(document[:-1])
            if kind == "byte" or "\N{REPLACEMENT CHARACTER}" not in shown:
                assert inverted(shown) == word


def test_a_sentinel_in_a_text_stays_text(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        sentinels = {tokenizer.special[name].id for name in NAMES}
        [result] = rearranged(tokenizer, FimConfig(rate=1, sentinels=NAMES), ["<SUF><MID>" * 9])
        assert sum(id in sentinels for id in result) == 4


def is_near_share(count: int, total: int, share: float) -> bool:
    return abs(count - total * share) <= 5 * math.sqrt(total * share * (1 - share))


def test_the_shares_and_the_places_are_those_that_were_asked_for() -> None:
    config = FimConfig(rate=0.3, spm=0.2, sentinels=NAMES)
    rule = Rearrangement(config, ByteTokenizer(BYTES).special)
    words = [f"{n:07d}" for n in range(20_000)]
    counts = rule.count([*words, "ab"])
    psm, spm = (counts[f"fill-in-the-middle: {order}"] for order in ("PSM", "SPM"))
    assert is_near_share(psm + spm, len(words), 0.3)
    assert is_near_share(spm, psm + spm, 0.2)
    assert not is_near_share(psm + spm, len(words), 0.33)  # the bounds can fail
    places: Counter[int] = Counter()
    for mark in rule.rearrange(words)[1]:
        if len(mark.special) == 4 and mark.special[0][2] == 257:
            places[mark.special[1][0]] += 1  # PSM: length of the prefix, the smaller of two places
    draws = {low: sum(min(a, b) == low for a in range(8) for b in range(8)) for low in range(8)}
    assert all(is_near_share(places[low], psm, draws[low] / 64) for low in range(1, 8))


@pytest.fixture
def dna(tmp_path: Path) -> Path:
    path = tmp_path / "dna.fasta"
    path.write_text("".join(f">s{n}\n{'ACGTacgtn' * (n + 1)}\n" for n in range(40)))
    return path


@pytest.mark.slow
def test_workers_resumes_and_the_naive_rule_give_one_dataset(
    corpus: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(corpus / "short.jsonl", [f"{n:02d}" for n in range(40)])
    fim = FimConfig(rate=0.9, sentinels=NAMES, seed=4)
    options: dict[str, Any] = {"byte": BYTES, "fim": fim, "shuffle": 3, "splits": {"val": 0.2}}
    whole = snapshot(run_build(corpus, out="whole", **options))
    three = ExecutorConfig(workers=3)
    assert snapshot(run_build(corpus, out="three", engine=three, **options)) == whole
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_build(corpus, **options)
    out = run_build(corpus, **options)
    assert snapshot(out) == whole
    plain = run_build(corpus, out="plain", byte=BYTES, shuffle=3, splits={"val": 0.2})
    ids = dict(zip(SPECIAL, range(256, 261), strict=True))
    changed = 0
    for name in ("train", "val"):
        for (_, text, before), (_, _, after) in zip(
            read_dataset(plain / name), read_dataset(out / name), strict=True
        ):
            assert after == naive(text, fim, lambda t: list(t.encode()), ids)
            changed += before != after
    counts = manifest.load(str(out / "val")).generations[0].provenance["counts"]
    result = {
        order: counts[f"fill-in-the-middle: {order}"] for order in ("PSM", "SPM", "too short")
    }
    assert result["PSM"] + result["SPM"] == changed > 150
    assert is_near_share(result["too short"], 40, 0.9)


def test_counts_of_a_resumed_task_cover_its_finished_shards(
    tmp_path: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.tokenize.builder import tasks

    words = [*texts(60), "no dna: zzz" * 20, *["ACGTac" * n for n in range(1, 60)]]
    path = write_jsonl(tmp_path / "a.jsonl", words)
    options: dict[str, Any] = {
        "byte": ByteConfig(special_tokens=SPECIAL, dna=True, max_foreign=0.5),
        "fim": HALF,
        "on_error": "skip",
        "shard_size": 3_000,
        "slice_size": 1 << 20,
    }
    whole = run_build(path, out="whole", **options)
    written = tasks.write_shard
    shards_until_kill = [2]

    def stop(*args: Any) -> Any:
        if not shards_until_kill[0]:
            raise KeyboardInterrupt
        shards_until_kill[0] -= 1
        return written(*args)

    with monkeypatch.context() as patched:
        patched.setattr(tasks, "write_shard", stop)
        with pytest.raises(KeyboardInterrupt):
            run_build(path, **options)
    assert snapshot(run_build(path, **options)) == snapshot(whole)
    counts = manifest.load(str(whole)).generations[0].provenance["counts"]
    stored = sum(257 in ids for _, _, ids in read_dataset(whole))
    assert counts["fill-in-the-middle: PSM"] + counts["fill-in-the-middle: SPM"] == stored
    assert counts["bad: not tokenizable"] > 0


def test_dna_keeps_its_loss_weights(dna: Path, run_build: Run) -> None:
    from headrace.dataplane.datasets.dataset import Dataset

    byte = ByteConfig(special_tokens=SPECIAL, dna=True)
    out = run_build(dna, byte=byte, fim=FimConfig(rate=1, sentinels=NAMES))
    data = Dataset(str(out))
    total = int(data.shard_tokens[-1])
    table, codes = data.weight_table, data.codes(0, total)
    assert table is not None
    light = sum(int((table[part] < 1).sum()) for part in codes)
    assert light == sum(5 * (n + 1) for n in range(40))  # acgtn, and no sentinel


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"byte": ByteConfig()}, "the sentinel <PRE> is no special token .* --special"),
        ({"fim": FimConfig(rate=1, sentinels=(END, "<SUF>", "<MID>"))}, "ends documents"),
    ],
)
def test_wrong_sentinels_are_misuse(
    corpus: Path, run_build: Run, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(MisuseError, match=message):
        run_build(corpus, **{"byte": BYTES, "fim": HALF, **options})


def test_a_tokenizer_that_adds_spaces_is_refused(bpe: Path, tokenizers: dict[str, Any]) -> None:
    for tokenizer in tokenizers.values():
        check_tokenizer(HALF, tokenizer)
    data = json.loads(bpe.read_bytes())
    level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    data["pre_tokenizer"] = {**level, "add_prefix_space": True}
    spaced = BpeTokenizer(json.dumps(data).encode(), BpeConfig(), source="t")
    with pytest.raises(MisuseError, match="a space before each part"):
        check_tokenizer(HALF, spaced)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_document_tokens": 9}, "max_document_tokens splits them"),
        ({"byte": ByteConfig(parse_special=True)}, "imitate"),
        ({"byte": ByteConfig(mask_control_tags=True)}, "within a tag"),
    ],
)
def test_settings_that_contradict_it_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BuildConfig(inputs=("a",), out="b", **{"tokenizer": "byte", "fim": HALF, **options})


def test_another_rate_is_another_build(corpus: Path, run_build: Run) -> None:
    run_build(corpus, byte=BYTES, fim=HALF)
    with pytest.raises(StorageError, match="other settings: fim was"):
        run_build(corpus, byte=BYTES, fim=FimConfig(rate=0.4, sentinels=NAMES))
    with pytest.raises(StorageError, match=r"other settings: fim was .*, is not given"):
        run_build(corpus, byte=BYTES)


def test_the_command_rearranges_and_counts(tmp_path: Path, bpe: Path) -> None:
    path, out = write_jsonl(tmp_path / "a.jsonl", texts(30)), str(tmp_path / "out")
    command = ["build", str(path), "--tokenizer", str(bpe), "--out", out, "--workers", "1"]
    options = ["--fim", "1", "--fim-sentinels", ",".join(NAMES[:3]), "--fim-spm", "0"]
    result = CliRunner().invoke(main, [*command, *options])
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(main, ["inspect", out, "--document", "0"]).output
    assert "<PRE>" in shown and "<SUF>" in shown and "<MID>" in shown
    assert "fill-in-the-middle: PSM: 30" in CliRunner().invoke(main, ["inspect", out]).output
    for wrong, message in (
        (["--fim-spm", "0.5"], "--fim-spm needs --fim"),
        (["--fim", "0.5"], "--fim needs --fim-sentinels"),
        (["--fim", "0.5", "--fim-sentinels", "a,b"], "three or four different"),
        (["--fim", "2", "--fim-sentinels", "<PRE>,<SUF>,<MID>"], "the rate is 2"),
    ):
        result = CliRunner().invoke(main, [*command, *wrong])
        assert (result.exit_code, message in result.output) == (2, True), result.output
