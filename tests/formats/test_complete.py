"""Everything that turns names of fields into keys has a sample: uses of asdict and its kin, the
formats of docs/files.md, commands with --json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from formats.samples import RENEW, SAMPLES, WORLD
from formats.story import MAKING, READING
from formats.test_names import sources

from headrace.console.headrace import main

USE = re.compile(
    r"(?<![\w.])(?:dataclasses\.)?(?:asdict|vars|fields)\((?!self, first)|\._asdict\(|__dict__"
)
"""Turns the names of a dataclass' fields into keys."""

USES: dict[str, tuple[int, str]] = {
    "console": (7, "keys-of-yaml/*.txt, keys/doctor.json, world/main/run.yaml"),
    "dataplane/datasets": (
        4,
        "world/corpora/*/manifest.json, world/corpora/*/tables/*.arrow, "
        "world/corpora/web/train/about.json",
    ),
    "dataplane/order": (
        7,
        "world/plan.json, world/changing.json, keys/order-slow-jobs.json, keys/order-tables.json",
    ),
    "dataplane/runlog": (2, "world/main/ledger.jsonl, keys/decisions-odm.json"),
    "mixtures/audit": (6, "printed/audit*.json, keys/board.json, keys/decisions-held-out.json"),
    "mixtures/exposure": (3, "printed/find.json"),
    "mixtures/proof": (2, "world/proof.json"),
    "mixtures/lr_shapes": (1, "keys-of-yaml/mixture.txt"),
    "mixtures/planning": (2, "world/plan.json, keys/decisions-odm.json: `control`"),
    "mixtures/steering": (2, "keys/steer.json"),
    "mixtures/view": (2, "keys/plot.json, printed/plan*.json"),
    "models": (1, "keys/models-list-published.json"),
    "models/accounting": (1, "keys/models-show.json"),
    "models/attestation": (4, "keys/attestation.json, keys/doctor-kernels.json"),
    "models/compilation": (5, "keys/programs.json, keys/kernels-compile.json"),
    "models/conversion": (3, "a comparison of two configurations, which is not written"),
    "models/operators": (1, "no file: a copy of a call's context"),
    "models/model": (1, "world/main/signals.jsonl"),
    "planner": (2, "keys/plan.json: `ideas`, keys/plan-scales.json"),
    "planner/hardware": (2, "keys-of-yaml/hardware.txt"),
    "planner/simulation": (2, "keys/plan.json: `failures`"),
    "planner/traces": (1, "a cache that is named by the source of the planner: it is traced again"),
    "planner/tune": (3, "keys/tune.json, files/tune/results/00-0.json"),
    "reports/anneal": (2, "world/anneal/anneal.json, world/anneal/scores.json"),
    "reports/board": (3, "keys/board.json"),
    "reports/report": (1, "printed/list.json"),
    "tokenize": (
        8,
        "printed/contamination.json, world/found.parquet, printed/count.json, "
        "printed/inspect*.json, printed/verify-damaged.json, world/views/*/tables/*.arrow",
    ),
    "tokenize/builder": (
        3,
        "world/corpora/mds/manifest.json, world/corpora/*/manifest.json, "
        "files/build/work/tasks/0.json",
    ),
    "tokenize/chat": (1, "world/corpora/chat/manifest.json"),
    "tokenize/corpus": (1, "world/corpora/mds/manifest.json"),
    "tokenize/neardup": (
        5,
        "world/drop.neardup/neardup.json, printed/neardup.json, printed/duplicates.json",
    ),
    "tokenize/sources": (1, "world/corpora/web/train/manifest.json"),
    "tokenize/views": (1, "world/views/*/tables/*.arrow"),
    "trainer": (1, "printed/clean.json"),
    "trainer/accounting": (1, "keys-of-yaml/run.txt"),
    "trainer/checkpoints": (
        6,
        "world/main/checkpoints/*/state.json, world/main/checkpoints/*/manifest.json, "
        "world/main/checkpoints/*/tensors/.metadata",
    ),
    "trainer/engines": (1, "no file: FSDP2's settings become those of one rank"),
    "trainer/guide": (6, "printed/config*.json, printed/recipes.json, keys/recipe.json"),
    "trainer/inference": (1, "printed/sample.json"),
    "trainer/launch": (3, "commands.txt: the options of a start and the launcher's words"),
    "trainer/loop": (1, "world/main/signals.jsonl"),
    "trainer/record": (1, "world/main/ledger.jsonl"),
}
"""How often the modules of a room use them, and the samples with the keys, or why none has them."""

FORMATS: dict[str, str] = {
    "`manifest.json`": "world/corpora/web/train/manifest.json",
    "`tables/*.arrow` (shard tables)": "world/corpora/web/train/tables/*.arrow",
    "`shards/*`": "world/corpora/*/shards/*",
    "`fields/*.arrow`": "world/corpora/web/train/fields/*.arrow",
    "`tables/*.inputs`, `*.digests`": "world/corpora/web/train/tables/*.digests",
    "`tokenizers/*.json`": "world/corpora/web/train/tokenizers/*.json",
    "`index.json` (MDS)": "world/corpora/mds/index.json",
    "`views/*.bits`, `views/*.arrow`": "world/views/packed/views/*.arrow",
    "`about.json` (dataset)": "world/corpora/web/train/about.json",
    "the cache of remote shards": "bytes of shards, without keys",
    "`work/tasks/*.json`, `work/states/*.json`": "keys/work.json",
    "`work/digests`, `drops`, `spills`, `parts`": "arrays, without keys",
    "`work/claims/*.json` (locks)": "keys/work.json",
    "drop lists of `tokenize neardup`": "world/drop.parquet",
    "drop lists of yours": "world/drop.parquet",
    "`*.neardup/neardup.json`": "world/drop.neardup/neardup.json",
    "`*.neardup/results/*.parquet`": "world/drop.neardup/results/*.parquet",
    "`~/.cache/headrace-tokenize`": "world/cache/headrace-tokenize/fingerprints.sqlite",
    "`plan.json`, `held-out-*.json`": "world/main/held-out-*.json",
    "`ledger.jsonl`": "world/main/ledger.jsonl",
    "`decisions.jsonl`": "keys/decisions-odm.json, keys/decisions-held-out.json",
    "`steer.json`": "keys/steer.json",
    "`checkpoints/*/manifest.json`": "world/main/checkpoints/*/manifest.json",
    "other files of a checkpoint": "world/main/checkpoints/*/state.json",
    "`anneal.json`, `hybrids.json`, `start.json`, `tune.json`, `results/*.json` of a tune": "world/"
    "anneal/anneal.json, keys/hybrids-request.json, keys/start-request.json, "
    "keys/tune-request.json, files/tune/results/*.json",
    "`scores.json` of an anneal": "world/anneal/scores.json",
    "`measured.json`": "files/run/measured.json",
    "`about.json` (run)": "world/main/about.json",
    "`metrics.jsonl`, `events.jsonl`, `evaluations.jsonl`, `signals.jsonl`, `documents.jsonl`, "
    "`scores.jsonl`, `recall.jsonl`": "world/main/metrics.jsonl, world/main/documents.jsonl",
    "`board/`": "keys/board.json",
    "`~/.cache/headrace-kernels`": "keys/attestation.json",
    "`headrace-programs.json` in Triton's cache": "keys/programs.json",
    "`~/.cache/headrace-plans`, `~/.cache/headrace-traces`": "keys/order-tables.json, "
    "keys/order-slow-jobs.json, and traces: values by a question, which holds names of classes (a "
    "renamed one is traced again)",
}
"""The rows of docs/files.md, with a sample or the reason that there is none."""

ELSEWHERE = {
    "headrace bench blocks": "keys/bench-blocks.json",
    "headrace bench collectives": "a line for each size, as a table of measured figures",
    "headrace compare-hybrids": "keys/compare-hybrids.json",
    "headrace doctor": "keys/doctor.json, keys/doctor-kernels.json",
    "headrace kernels compile": "keys/kernels-compile.json",
    "headrace mixtures plot": "keys/plot.json",
    "headrace mixtures search": "keys/search.json",
    "headrace mixtures steer": "keys/steer.json",
    "headrace models list": "keys/models-list.json",
    "headrace models show": "keys/models-show.json",
    "headrace trainer board": "serves until it is ended; keys/board.json has what it serves",
    "headrace trainer eval": "keys/eval.json",
    "headrace trainer plan": "keys/plan.json",
    "headrace trainer plan price": "keys/plan-price.json",
    "headrace trainer plan show": "keys-of-yaml/layout-plan.txt: it prints the plan's file",
    "headrace trainer resume": "printed/run.json: it prints what `run` does",
    "headrace trainer tune": "keys/tune.json",
}
"""Commands with --json that the story leaves out, because they take long. Tests of their folders
compare their keys with a sample (`pin_keys`)."""


ALL = (USES, FORMATS, ELSEWHERE)


def exists(sample: str) -> bool:
    """True for a reason, and for samples that are there."""
    places = re.findall(r"(?:^|, )((?:world|files|keys|printed|keys-of-yaml)/[^,:]+)", sample)
    return all(any(SAMPLES.glob(place)) for place in places)


def test_each_use_of_names_as_keys_has_a_sample() -> None:
    result: Counter[str] = Counter()
    for path, text in sources().items():
        room = "/".join(path.split("/")[:-1][:2])
        result[room] += sum(bool(USE.search(line)) for line in text.splitlines())
    assert +result == Counter({room: count for room, (count, _) in USES.items()})
    assert RENEW or not [sample for _, sample in USES.values() if not exists(sample)]


@pytest.mark.parametrize(
    ("line", "uses"),
    [
        ("return asdict(self)", True),
        ("data = {**vars(run)}", True),
        ("for field in dataclasses.fields(kind):", True),
        ("own._asdict()", True),
        ("rows = dataset.fields(first, last)", False),
        ("keep_vars(x)", False),
    ],
)
def test_a_new_use_is_found(line: str, uses: bool) -> None:
    """Negative control."""
    assert bool(USE.search(line)) == uses


def test_each_format_has_a_sample() -> None:
    page = (Path(__file__).parents[2] / "docs/files.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|[^|]+\|[^|]+\|$", page, re.MULTILINE)
    names = [row.strip() for row in rows if row.strip() not in ("file", "---")]
    first = names.index("`about.json`")
    places = [
        f"{name} ({'dataset' if place == first else 'run'})" if name == "`about.json`" else name
        for place, name in enumerate(names)
    ]
    assert sorted(places) == sorted(FORMATS)
    assert RENEW or not [sample for sample in FORMATS.values() if not exists(sample)]


def test_each_command_with_json_has_a_sample() -> None:
    steps = [f"headrace {step.words}" for step in (*MAKING, *READING) if "--json" in step.words]
    missing = {
        path
        for path in json_commands(main, "headrace")
        if not any(step.startswith(f"{path} ") for step in steps)
    }
    assert missing == set(ELSEWHERE)
    assert RENEW or not [sample for sample in ELSEWHERE.values() if not exists(sample)]


def test_each_sample_is_compared() -> None:
    """A sample that nothing compares is one that nobody renews."""
    printed = {f"{step.name}.json" for step in (*MAKING, *READING)}
    assert {file.name for file in (SAMPLES / "printed").iterdir()} == printed
    pinned = {Path(word).name for word in re.findall(r"keys/[\w-]+\.json", str(ALL))}
    assert {file.name for file in (SAMPLES / "keys").iterdir()} == pinned


def json_commands(command: click.Command, path: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    if any("--json" in parameter.opts for parameter in command.params):
        yield path
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from json_commands(below, f"{path} {name}")


def test_the_samples_are_small() -> None:
    sizes = {file: file.stat().st_size for file in SAMPLES.rglob("*") if file.is_file()}
    assert sum(sizes.values()) < 600_000
    assert all(size < 90_000 for size in sizes.values())
    assert any(WORLD.iterdir())
