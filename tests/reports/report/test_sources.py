"""The datasets of a run, on its page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from support.data.corpora import ONE
from support.data.small_data import plan_of

from headrace.reports.report import sources
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.sources.fields import KeptField
from headrace.tokenize.sources.format import SourceConfig
from headrace.tokenize.views.select import SelectConfig, select


def test_the_table_shows_fields_and_views(tmp_path: Path) -> None:
    lines = [{"text": "word " * 30, "score": k / 10} for k in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    web, good = str(tmp_path / "web"), str(tmp_path / "good")
    build(
        BuildConfig(
            inputs=(str(tmp_path / "a.jsonl"),),
            out=web,
            tokenizer="byte",
            source=SourceConfig(keep=(KeptField(name="score"),)),
            engine=ONE,
        )
    )
    select(SelectConfig(dataset=web, where="score < 1", out=good, engine=ONE))
    plan = plan_of(
        {
            "seed": 1,
            "sources": {"web": {"data": web}, "good": {"data": good}},
            "phases": {
                "all": {
                    "tokens": 640,
                    "seq_len": 32,
                    "batch": 64,
                    "weights": {"web": 0.5, "good": 0.5},
                }
            },
        }
    )
    page = sources.table(plan)
    assert f"<th>web</th><td>{web}</td><td>20</td><td>3.02K</td><td>score (float)</td>" in page
    assert (
        f"<td>10</td><td>1.51K</td><td>score (float)</td><td>{web} where score &lt; 1</td>" in page
    )
    shutil.rmtree(good)
    assert f"<th>good</th><td>{good}</td><td>–</td>" in sources.table(plan)
    shutil.rmtree(web)
    assert sources.table(plan) == ""
