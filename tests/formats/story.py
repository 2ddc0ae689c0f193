"""A small world that the commands make: corpora, datasets, views, a plan, a run, an anneal.

MAKING writes its files; READING reads the committed ones. All paths are relative to its folder.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from click.testing import CliRunner
from support.ranks import forked

from headrace.console.headrace import main


class Step(NamedTuple):
    name: str
    """Name of the sample of what the command prints."""
    words: str
    measured: bool = False
    """The output depends on the machine: its floats and times are masked."""
    code: int = 0


MODEL = """
vocab_size: 300
width: 4
pattern: "[attention, moe]"
operators:
  attention: {kind: attention, heads: 2}
  moe: {kind: moe, experts: 2, top_k: 1, hidden: 8}
"""
MIXTURE = """
sources:
  web: {data: corpora/web/train, max_epochs: 90}
  low: {data: views/low, max_epochs: 90}
phases:
  stable: {tokens: 1K, seq_len: 64, batch: 256, weights: {web: 0.75, low: 0.25}}
  decay: {tokens: 1K, seq_len: 64, batch: 256, weights: {web: 0.5, low: 0.5}, lr: {shape: linear}}
"""
CHANGING = """
sources:
  web: {data: corpora/web/train, max_epochs: 90}
  low: {data: views/low, max_epochs: 90}
phases:
  short: {tokens: 1K, seq_len: 32, batch: 128, weights: {web: {from: 0.9, to: 0.5}, low: {from: 0.1, to: 0.5}}}
  long: {tokens: 1K, seq_len: 64, batch: 256, weights: {web: 0.5, low: 0.5}}
"""  # noqa: E501
ANNEAL = """
phases: {anneal: {tokens: 512, weights: {decay: 0.5, low: 0.5}, lr: {shape: linear}}}
"""
RUN = """
engine: {kind: fsdp2}
optimizer: {lr: 1e-2, ema: 0.9}
z_loss: 1e-4
threads: 1
checkpoints: {every: 2, keep_last: 9}
evaluate: {every: 4, rows: 2}
watch: {layers: 4, noise: 4, tensorboard: false}
"""
CPU = """
name: cpu
devices_per_node: 1
sources: {here: {kind: measured, date: "2026-11-22", text: a test}}
device: {name: cpu, kind: cpu, memory: 1073741824, source: here}
reserved: {bytes: 1, source: here}
matmul: [{m: 64, k: 64, n: 64, precision: fp32, rate: 1e10, source: here}]
memory: [{bytes: 1048576, rate: 1e10, source: here}]
"""
WORDS = ["water", "wheel", "mill", "stream", "roue", "naïve", "水"]
ONE = "--workers 1 --json"
BUILD = f"--id-field id --keep score:float --dedup exact --split val=0.2 {ONE}"

MAKING = [
    Step("train", "tokenize train web.jsonl --out bpe.json --vocab-size 300 --json"),
    Step("neardup", f"tokenize neardup web.jsonl --out drop.parquet --ngram 2 {ONE}"),
    Step("build", f"tokenize build web.jsonl --out corpora/web --tokenizer bpe.json {BUILD}"),
    Step(
        "build-more",
        f"tokenize build web.jsonl more.jsonl --out corpora/web --tokenizer bpe.json {BUILD}",
    ),
    Step(
        "build-mds",
        "tokenize build web.jsonl --out corpora/mds --format mds --tokenizer byte "
        f"--decontaminate evaluations.jsonl --drop drop.parquet --shuffle 1 {ONE}",
    ),
    Step("build-dna", f"tokenize build dna.txt --out corpora/dna --tokenizer byte --dna {ONE}"),
    Step(
        "build-genome",
        "tokenize build genome.fa --out corpora/genome --tokenizer byte --dna "
        f"--window 6 --stride 4 --reverse-complement both {ONE}",
    ),
    Step(
        "build-chat",
        "tokenize build chat.jsonl --out corpora/chat --tokenizer byte --chat chatml "
        f"--special <|im_start|> --special <|im_end|> {ONE}",
    ),
    Step("select", f"tokenize select corpora/web/train --where 'score<2' --out views/low {ONE}"),
    Step("sort", f"tokenize sort corpora/mds --by tokens --out views/sorted {ONE}"),
    Step("pack", f"tokenize pack corpora/web/train --length 64 --out views/packed {ONE}"),
    Step(
        "contamination",
        f"tokenize contamination corpora/web/train evaluations.jsonl --out found.parquet {ONE}",
    ),
    Step("card", "tokenize card corpora/web/train --license MIT --source here --out card.md"),
    Step("plan", "mixtures plan main.yaml --out plan.json --json"),
    Step("plan-changing", "mixtures plan changing.yaml --out changing.json --json"),
    Step(
        "run", "trainer run run.yaml --mixture main.yaml --model model.yaml --out main --json", True
    ),
    Step(
        "prove-document",
        "mixtures prove main --document id-3 --source web --out proof.json --json",
    ),
    Step("recall", "trainer recall main --lengths 64 --examples 2 --json", True),
    Step("clean", "trainer clean main --keep-last 1 --json", True),
    Step("anneal", "trainer anneal main --mixtures anneal.yaml --out anneal --json", True),
]
"""Commands that write the files of the world."""

READING = [
    Step("count", f"tokenize count web.jsonl --tokenizer bpe.json {ONE}"),
    Step("inspect", "tokenize inspect corpora/web --documents 1 --json"),
    Step("inspect-chat", "tokenize inspect corpora/chat --document 0 --json"),
    Step("inspect-view", "tokenize inspect views/low --document 0 --json"),
    Step("duplicates", "tokenize duplicates drop.parquet --json"),
    Step("verify", f"tokenize verify corpora/web/train {ONE}"),
    Step("verify-damaged", f"tokenize verify damaged {ONE}", code=1),
    Step("index", "tokenize index foreign --workers 1 --json"),
    Step("new", "mixtures new corpora/web/train views/low --json"),
    Step("check", "mixtures check main.yaml --json"),
    Step("check-wrong", "mixtures check main.yaml phases.decay.weights.web=0.9 --json", code=1),
    Step("plan-read", "mixtures plan plan.json --tokens-per-second 1e3 --json"),
    Step("audit", "mixtures audit main --step 5 --text --json"),
    Step("audit-packed", "mixtures audit packed.yaml --rows 0:2 --json"),
    Step("documents", "trainer documents main --worst 2 --json"),
    Step("documents-by", "trainer documents main --by source --json"),
    Step("find", "mixtures find main --documents id-3,nobody --json"),
    Step("prove", "mixtures prove main --json"),
    Step("summary", "mixtures summary main --json"),
    Step("verify-proof", "mixtures verify proof.json --json"),
    Step(
        "dry-run",
        "trainer run run.yaml --mixture main.yaml --model model.yaml --dry-run --json",
        True,
    ),
    Step("report", "trainer report main --json", True),
    Step("list", "trainer list . --json", True),
    Step(
        "anneal-report", "trainer anneal main --mixtures anneal.yaml --out anneal --report --json"
    ),
    Step("anneal-dry-run", "trainer anneal main --mixtures anneal.yaml --dry-run --json"),
    Step("export", "trainer export main exported --format headrace --json", True),
    Step("sample", "trainer sample main --prompt water --tokens 4 --temperature 0 --json", True),
    Step(
        "variants",
        "trainer variants main calls.vcf --reference genome.fa --out scores.tsv --dry-run --json",
    ),
    Step("embed", "trainer embed main genome.fa --out states --dry-run --json"),
    Step("recipes", "recipes --json"),
    Step("config", "config optimizer.lr run.yaml --json"),
    Step("config-section", "config checkpoints --json"),
]
"""Commands that read the committed world."""

FORKED = {"run", "dry-run", "recall", "report", "export", "sample", "variants", "embed"}
"""Commands that import torch: they run as forks of a process that has imported it."""


def write_inputs(root: Path) -> None:
    """Write the files that a person would write: corpora and YAML."""
    chance = random.Random(7)

    def texts(count: int, name: str) -> list[str]:
        lengths = [chance.randint(3, 20) for _ in range(count)]
        return [
            f"{name}-{n} " + " ".join(chance.choices(WORDS, k=k)) for n, k in enumerate(lengths)
        ]

    def write(name: str, records: list[dict[str, object]]) -> None:
        lines = [json.dumps(record) + "\n" for record in records]
        (root / name).write_text("".join(lines))

    web = texts(40, "web")
    web += [*web[:3], f"{web[5]} again"]
    write("web.jsonl", [{"text": t, "id": f"id-{n}", "score": n / 8} for n, t in enumerate(web)])
    more = enumerate(texts(12, "more"))
    write("more.jsonl", [{"text": t, "id": f"more-{n}", "score": 0.5} for n, t in more])
    write("evaluations.jsonl", [{"question": text} for text in web[:2]])
    write(
        "chat.jsonl",
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
    )
    (root / "dna.txt").write_text("ACGTacgtACGT" * 8)
    (root / "genome.fa").write_text(">one\nACGTACGT\nAC\n")
    (root / "calls.vcf").write_text("##fileformat=VCFv4.3\none\t5\t.\tA\tC,<DEL>\n")
    yamls = {
        "model": MODEL, "main": MIXTURE, "changing": CHANGING, "anneal": ANNEAL, "run": RUN,
        "cpu": CPU, "packed": "sources: {web: {data: views/packed}}\nphases: "
        "{only: {tokens: 128, seq_len: 64, batch: 64, weights: {web: 1}}}\n",
    }  # fmt: skip
    for name, text in yamls.items():
        (root / f"{name}.yaml").write_text(text.lstrip())


def perform(step: Step, root: Path) -> tuple[int, str, str]:
    """Run a command in the world, which is the current folder; return its exit code, stdout and
    stderr."""
    words = shlex.split(step.words)
    if step.name in FORKED:
        done = forked.run([sys.executable, "-m", "headrace.console.headrace", *words], cwd=root)
        return done.returncode, done.stdout, done.stderr
    result = CliRunner().invoke(main, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def parsed(text: str) -> list[object]:
    """Return the JSON documents that a command printed: one, or one a line."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]
