"""Types of kept fields: the hint for a wrong one, optional fields, and lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data.corpora import documents_with_fields, keep, write_lines

from headrace.console.errors import InputError, StorageError
from headrace.dataplane.datasets import manifest
from headrace.tokenize.verify import verify

Run = Callable[..., Path]


def test_a_field_of_another_type_has_a_hint_that_works(tmp_path: Path, run_build: Run) -> None:
    path = tmp_path / "a.parquet"
    columns = {
        "day": pa.array([19_000], pa.date32()),
        "at": pa.array([0], pa.timestamp("us")),
        "inside": pa.array([{"part": 1}]),
        "list": pa.array([[[1]]]),
    }
    pq.write_table(pa.table({"text": ["water"], **columns}), path)
    hints = {
        "day": "--keep day:string",
        "at": "--keep at:string",
        "inside": "--keep inside.part",
        "list": "leave it out",
    }
    for name, hint in hints.items():
        with pytest.raises(InputError, match=f"the field `{name}` holds") as caught:
            run_build(path, source=keep(name))
        assert hint in str(caught.value.hint)
    out = run_build(path, source=keep("day:string", "at:string"))
    assert [row["day"] for _, row in documents_with_fields(out)] == ["2022-01-08"]


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("score:int", "score:float"),
        ("score:string", "score:float"),
        ("tags:string", "tags:list<string>"),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_wrong_type_has_a_hint_with_the_right_one(
    tmp_path: Path, run_build: Run, field: str, meant: str, ending: str
) -> None:
    lines = [{"text": "water", "score": 0.5, "tags": ["a"]}]
    path = tmp_path / f"a.{ending}"
    if ending == "jsonl":
        write_lines(path, lines)
    else:
        pq.write_table(pa.Table.from_pylist(lines), path)
    with pytest.raises(InputError) as caught:
        run_build(path, source=keep(field))
    assert f"--keep '{meant}'" in str(caught.value.hint)
    run_build(path, source=keep(meant))


def of_every_format(folder: Path, lines: list[dict[str, Any]]) -> list[Path]:
    """Write records as JSON lines, Parquet and Arrow."""
    table = pa.Table.from_pylist(lines)
    pq.write_table(table, folder / "b.parquet")
    with pa.ipc.new_file(folder / "c.arrow", table.schema) as writer:
        writer.write_table(table)
    return [write_lines(folder / "a.jsonl", lines), folder / "b.parquet", folder / "c.arrow"]


def test_an_optional_field_is_null_where_a_record_or_a_file_lacks_it(
    tmp_path: Path, run_build: Run
) -> None:
    lines = [{"text": "a", "n": 1, "m": {"x": "y"}}, {"text": "b"}, {"text": "c", "m": {}}]
    source = keep("n:float?", "m.x?", "l:list<int>?")
    files = of_every_format(tmp_path, [{"text": "d"}])
    (tmp_path / "d.csv").write_text("text,n\ne,2\n")
    out = run_build(
        write_lines(tmp_path / "first.jsonl", lines), *files, tmp_path / "d.csv", source=source
    )
    rows = [tuple(row.values()) for _, row in documents_with_fields(out)]
    nothing = (None, None, None)
    assert rows == [(1.0, "y", None), nothing, nothing, *[nothing] * 3, (2.0, None, None)]
    assert manifest.load(str(out)).kept_fields == {"n": "float", "m.x": "string", "l": "list<int>"}
    assert verify(str(out)) == []
    with pytest.raises(StorageError, match=r"keep was n:float\?,m.x:string\?,.* is n:float,"):
        run_build(tmp_path / "first.jsonl", source=keep("n:float", "m.x?", "l:list<int>?"))
    with pytest.raises(InputError, match="no field `n`"):
        run_build(tmp_path / "first.jsonl", source=keep("n:float"), out="required")


@pytest.mark.parametrize("options", [{}, {"shuffle": 3}, {"shuffle": 1, "shuffle_memory": 1 << 20}])
def test_lists_are_kept_as_they_are(
    tmp_path: Path, run_build: Run, options: dict[str, Any]
) -> None:
    lists: list[Any] = [["a", None], None, [], ["日本"], ["b"] * 3]
    lines = [
        {"text": f"{number} {lists[number % 5]}", "tags": lists[number % 5], "years": [number, 0.5]}
        for number in range(50)
    ]
    source = keep("tags", "years")
    files = of_every_format(tmp_path, lines)
    if options.get("shuffle_memory"):
        options = {**options, "shard_size": 1 << 16}
    expected = {line["text"]: {"tags": line["tags"], "years": line["years"]} for line in lines}
    for path in files if not options else files[:1]:
        out = run_build(path, source=source, out=path.stem, **options)
        assert manifest.load(str(out)).kept_fields == {
            "tags": "list<string>",
            "years": "list<float>",
        }
        assert dict(documents_with_fields(out)) == expected
        assert verify(str(out)) == []
