"""`trainer embed`: hidden states beside those of the plain model, over ranks, after a kill."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner, Result
from support.configs import CONFIGS
from support.ranks import forked
from support.ranks.ranks import Ranks

from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.models.config.config import load_model_config
from headrace.models.model.model import Model
from headrace.tokenize.cli import main as tokenize
from headrace.trainer.cli import main
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.inference import parts
from headrace.trainer.inference.embed import EMBED, Embedder, Sequences, embed
from headrace.trainer.inference.parts import part_path
from headrace.trainer.placement.team import Team

DRAW = random.Random(6)
TEXTS = ["".join(DRAW.choices("ACGT", k=length)) for length in (9, 30, 1, 17, 24, 2, 40, 5)]
NAMES = [f"gene-{number}" for number in range(len(TEXTS))]
LAYERS = ["0", "2", "norm"]
COLUMNS = ["layer_0", "layer_2", "norm"]


def write_sequences(folder: Path, ending: str) -> Path:
    if ending.startswith("jsonl"):
        pairs = zip(NAMES, TEXTS, strict=True)
        text = "\n".join(json.dumps({"id": name, "text": text}) for name, text in pairs)
    else:
        text = "".join(f">{name} x\n{text}\n" for name, text in zip(NAMES, TEXTS, strict=True))
    file = folder / f"sequences.{ending}"
    packed = ending.endswith(".gz")
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return file


@pytest.fixture(scope="module")
def model() -> Model:
    model = Model(load_model_config(str(CONFIGS / "tiny.yaml"), ["vocab_size=257"]))
    model.init_weights(1)
    return model.eval()


def plain_states(model: Model, text: str) -> dict[str, torch.Tensor]:
    """Return the states [tokens, width] of a text alone, from the outputs of its blocks."""
    batch = model.batch_context(torch.tensor([list(text.encode())]), None, None, None)
    with torch.no_grad():
        u = model.embed(torch.tensor([list(text.encode())]), batch)
        states = {}
        for number, block in enumerate(model.typed_blocks()):
            u, _ = block(u, batch.layer_context(counts_routed=False), None, None)
            states[f"layer_{number}"] = u[0]
        states["norm"] = model.norm(u)[0]
    return states


@pytest.mark.parametrize(("ending", "by_token"), [("fa", False), ("jsonl.gz", True)])
def test_states_are_those_of_the_plain_model(
    by_token: bool, ending: str, model: Model, tmp_path: Path
) -> None:
    file = write_sequences(tmp_path, ending)
    sequences = Sequences(str(file), ByteTokenizer(ByteConfig()), 40, 60)
    assert sequences.survey() == (8, 40, 60)
    out = tmp_path / "out"
    out.mkdir()
    team = Team({EMBED: Embedder(model, LAYERS, by_token, out)})
    embed(team, sequences, out, 0, 8)
    reached, files = parts.list_parts(out)
    assert reached == 8
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    expected = [plain_states(model, text) for text in TEXTS]
    if by_token:
        keys = ("number", "sequence", "position", "token")
        assert [tuple(row[key] for key in keys) for row in rows] == [
            (number, NAMES[number], position, ord(letter))
            for number, text in enumerate(TEXTS)
            for position, letter in enumerate(text)
        ]
        for row in rows:
            for column in COLUMNS:
                state = expected[row["number"]][column][row["position"]]
                assert torch.allclose(torch.tensor(row[column]), state, atol=1e-5)
        return
    assert [(row["number"], row["sequence"], row["tokens"]) for row in rows] == [
        (number, NAMES[number], len(text)) for number, text in enumerate(TEXTS)
    ]
    for row in rows:
        for column in COLUMNS:
            mean = expected[row["number"]][column].double().mean(0).float()
            assert torch.allclose(torch.tensor(row[column]), mean, atol=1e-5)


def read_tokens(folder: Path) -> pa.Table:
    table = pa.concat_tables([pq.read_table(file) for file in parts.list_parts(folder)[1]])
    return table.sort_by([("number", "ascending"), ("position", "ascending")])


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"shard": 2}])
def test_two_ranks_write_the_tokens_of_one(
    degrees: dict[str, int], tmp_path: Path, model: Model, ranks: Callable[[int], Ranks]
) -> None:
    file = write_sequences(tmp_path, "fa")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    sequences = Sequences(str(file), ByteTokenizer(ByteConfig()), 40, 60)
    one_rank = Team({EMBED: Embedder(model, LAYERS, True, tmp_path / "one")})
    embed(one_rank, sequences, tmp_path / "one", 0, 8)
    words = (model.config, degrees, str(file), LAYERS, str(tmp_path / "two"))
    ranks(2).run("inferring.embed_tokens", *words)
    single, double = read_tokens(tmp_path / "one"), read_tokens(tmp_path / "two")
    slices = 1 if "shard" in degrees else 2  # ranks that share weights alone have rows of their own
    assert len(list((tmp_path / "two").iterdir())) == slices * len(
        list((tmp_path / "one").iterdir())
    )
    for column in ("number", "sequence", "position", "token"):
        assert single[column].to_pylist() == double[column].to_pylist()
    for column in COLUMNS:
        states = [torch.tensor(table[column].to_pylist()) for table in (single, double)]
        assert torch.allclose(*states, atol=1e-5)


# The command


@pytest.fixture
def run(checkpoint_of: Callable[..., RunFolder], tmp_path: Path, model: Model) -> RunFolder:
    (tmp_path / "text.fa").write_text(f">a\n{''.join(TEXTS)}\n")
    words = ["build", str(tmp_path / "text.fa"), "--tokenizer", "byte", "--dna"]
    built = CliRunner().invoke(tokenize, [*words, "--out", str(tmp_path / "data")])
    assert built.exit_code == 0, built.output
    write_sequences(tmp_path, "fa")
    return checkpoint_of(model)


def words_for(run: RunFolder, out: str, *words: str, file: str = "sequences.fa") -> list[str]:
    folder = run.root.parent
    options = ["--data", str(folder / "data"), "--batch-tokens", "40", "--out", str(folder / out)]
    return ["embed", str(run.root), str(folder / file), *options, *words]


def ask(run: RunFolder, out: str, *words: str, **options: str) -> Result:
    return CliRunner().invoke(main, words_for(run, out, *words, **options))


PLUGIN = """
import os, signal
from headrace.trainer.inference import embed, parts
parts.SHORTEST = parts.SHARE = 0.0
call, batches = embed.Embedder.__call__, []
def die_at_the_third(self, batch):
    batches.append(batch)
    if len(batches) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(self, batch)
embed.Embedder.__call__ = die_at_the_third
"""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for file in parts.list_parts(folder)[1] for row in pq.read_table(file).to_pylist()]


@pytest.mark.slow
def test_a_killed_command_goes_on_where_it_was(run: RunFolder) -> None:
    folder, words = run.root.parent, ("--by-token", "--layers", "1,norm")
    assert ask(run, "whole", *words).exit_code == 0
    (folder / "plugin.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "headrace.trainer.cli", *words_for(run, "out", *words)]
    killed = forked.Command(command, plugin=folder / "plugin.py").wait()
    assert killed.returncode == -9
    assert parts.list_parts(folder / "out/parts")[0] == 2  # the first two batches
    part_path(folder / "out/parts", 2, 3, 0, 2).touch()  # the second slice is missing
    done = ask(run, "out", *words, "--json")
    assert done.exit_code == 0, done.output
    assert "2 sequences were embedded before" in done.stderr
    assert json.loads(done.stdout)["number"] == 8
    rows = rows_of(folder / "out/parts")
    assert rows == rows_of(folder / "whole/parts")
    assert rows == pq.read_table(folder / "out/parts").to_pylist()  # in this order
    assert not part_path(folder / "out/parts", 2, 3, 0, 2).exists()
    again = ask(run, "out", *words)
    assert again.exit_code == 0 and "8 sequences were embedded before" in again.stderr
    refused = ask(run, "out", "--layers", "0")
    assert refused.exit_code == 1 and "holds another embedding" in refused.output


def test_mistakes_are_named(run: RunFolder) -> None:
    folder = run.root.parent
    dry = ask(run, "out", "--dry-run", "--json")
    assert dry.exit_code == 0 and json.loads(dry.stdout) == {"sequences": 8, "layers": ["norm"]}
    assert "8 sequences, the longest of 40 tokens" in dry.stderr and "memory:" in dry.stderr
    short = ask(run, "out", "--max-length", "39")
    assert "gene-6 has 40 tokens, more than --max-length 39" in short.output
    assert "--layers 9: the model has no such layer" in ask(run, "out", "--layers", "9").output
    for name, content, message in (
        ("a.txt", "ACGT", "is no file of sequences by its name"),
        ("a.jsonl", '{"text": "A"}\n{"txt": "A"}', "line 2 is no JSON object with a `text`"),
        ("b.jsonl", "[1]", "line 1 is no JSON object with a `text`"),
        ("a.fa", ">a\nAC\n>b\n", "b is empty"),
    ):
        (folder / name).write_text(content)
        done = ask(run, "out", file=name)
        assert done.exit_code == 1 and message in done.output, done.output
    assert not (folder / "out").exists()
