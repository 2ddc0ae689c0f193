"""Cards of mixtures, beside the plan's summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from support.data.corpora import ONE, read_dataset, texts
from support.data.small_data import plan_of, random_documents, write_dataset

from headrace.dataplane.datasets import about
from headrace.dataplane.datasets.about import About
from headrace.dataplane.order.plan import Decision
from headrace.dataplane.order.stream import Stream
from headrace.mixtures.mixture_file.mixture import Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.view.card import render_card
from headrace.mixtures.view.summary import summarize
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.sources.format import KeptField, SourceConfig
from headrace.tokenize.views.select import SelectConfig, select


def test_a_card_of_a_mixture(head: Callable[..., str], tmp_path: Path) -> None:
    web, code = head("web", 9_000), head("code", 1_500)
    about.save(web, About(licenses=("CC-BY-4.0",), sources=("a crawl | of pages",)))
    mixture = Mixture(
        sources={"web": SourceSpec(data=web), "code": SourceSpec(data=code, max_epochs=4)},
        phases={
            "main": PhaseSpec(
                tokens=4_000, seq_len=16, batch=128, weights={"web": 0.75, "code": 0.25}
            )
        },
    )
    stream = Stream(resolve(mixture))
    summary = summarize(stream)
    page = render_card(stream, steps=7)
    assert f"# Training data of plan {summary.hash[:16]}" in page
    assert f"{summary.tokens:,} tokens in {summary.rows:,} rows" in page
    assert "The weights have seen its first 7 steps." in page
    assert f"| main | {summary.tokens:,} | {summary.steps:,} | 16 | 75.00% | 25.00% |" in page
    use = summary.total[1]
    assert f"| code | {use.tokens:,} | 25.00% | 1,500 | {use.epochs:.3g} |" in page
    assert "| web | CC-BY-4.0 | a crawl \\| of pages |" in page
    assert "| code | not stated | not stated |" in page
    assert "## Lengths" not in page  # the datasets have heads alone, without shards
    assert "Decisions" not in page
    row = stream.plan.step(summary.steps // 2).first_row
    decision = Decision(row=row, weights=(1, 1), digest="00" * 16)
    steered = render_card(stream.steer(replace(stream.plan, decisions=(decision,))))
    assert "Decisions about shares while the run went on: 1." in steered
    assert "| main (changing) | " in steered and "75.00%" not in steered
    (tmp_path / "code" / "manifest.json").unlink()
    assert "The datasets of these sources cannot be read: code." in render_card(stream)


def test_a_card_has_what_the_cards_of_its_datasets_say(tmp_path: Path) -> None:
    lines = [
        {"text": text, "language": "en" if number % 4 else "de"}
        for number, text in enumerate([*texts(100), *texts(5)])
    ]
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base, view = str(tmp_path / "base"), str(tmp_path / "view")
    build(
        BuildConfig(
            inputs=(str(corpus),),
            out=base,
            tokenizer="byte",
            dedup="exact",
            source=SourceConfig(keep=(KeptField(name="language"),)),
            engine=ONE,
        )
    )
    about.save(base, About(licenses=("CC-BY-4.0",), sources=("a crawl",)))
    result = select(SelectConfig(dataset=base, where="language == 'en'", out=view, engine=ONE))
    phase = PhaseSpec(tokens=4_000, seq_len=16, batch=128, weights={"bin": 1})
    mixture = Mixture(sources={"bin": SourceSpec(data=view)}, phases={"main": phase})
    page = render_card(Stream(resolve(mixture)))
    documents = read_dataset(tmp_path / "view")
    lengths = sorted(len(ids) for _, _, ids in documents)
    ratio = sum(len(text.encode()) for _, text, _ in documents) / sum(lengths)
    assert f"| bin | `{view}` | `{result.hash[:16]}` | 75 | {ratio:.3f} | none |" in page
    assert "| bin | CC-BY-4.0 (as its dataset states) | a crawl (as its dataset states) |" in page
    left_out = page.split("## Left out\n")[1].split("## ")[0]
    assert left_out.strip().splitlines()[2:] == [
        "| bin | the build | duplicates | 5 |",
        "| bin | the view | documents not chosen | 25 |",
    ]
    assert f" | {lengths[37]:,} | " in page.split("## Lengths\n")[1].split("## ")[0]
    assert "## Field `language` of bin\n" in page
    assert "| en | 100.00% | 100.00% |" in page


def test_a_card_counts_documents_without_loss(tmp_path: Path) -> None:
    write_dataset(str(tmp_path / "web"), random_documents(1, 90))
    (tmp_path / "drop.txt").write_text("id-3\nid-40\n")
    phase = {"tokens": 512, "seq_len": 32, "batch": 64, "weights": {"web": 1}}
    spec = {"sources": {"web": {"data": str(tmp_path / "web")}}, "phases": {"one": phase}}
    without = {"without": [str(tmp_path / "drop.txt")], "refill": True}
    plan = plan_of({**spec, **without})
    [source] = plan.sources
    tokens = sum(end - start for start, end in source.unlearnt)
    page = render_card(Stream(plan))
    assert tokens and f"| web | {tokens:,} | {len(source.refills):,} |" in page
    assert "Without documents" not in render_card(Stream(plan_of(spec)))
