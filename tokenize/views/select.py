"""`tokenize select`: a view with the documents for which an expression is true."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...console.errors import InputError, MisuseError
from ...console.progress import exact_count
from ...dataplane.datasets import view
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.datasets.manifest import Manifest
from ...dataplane.datasets.view import View
from ..executors import ExecutorConfig
from .making import ShardResult, ShardTask, ViewRequest, make_view, write_shard
from .where import Member, Where, parse


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    dataset: str
    """The URL of the dataset; it may be a view."""
    where: str
    """The expression."""
    out: str
    """The URL of the view."""
    engine: ExecutorConfig = field(default_factory=ExecutorConfig)
    """Executor of the tasks."""


@dataclass(frozen=True)
class SelectWorker:
    """Evaluates an expression over a shard's documents, and writes a bits file."""

    dataset: str
    out: str
    where: str

    @cached_property
    def base(self) -> Dataset:
        return Dataset(self.dataset)

    @cached_property
    def parsed(self) -> Where:
        return parse(self.where, self.base.manifest.kept_fields)

    def __call__(self, task: ShardTask) -> Iterator[ShardResult]:
        dataset, number = self.base, task.number
        entry = dataset.shards[number]
        first_document = int(dataset.shard_documents[number])
        field_names = sorted(self.parsed.names)
        table = dataset.columns(first_document, first_document + entry.documents, field_names)
        nulls = {field_name: table.column(field_name).null_count for field_name in field_names}
        selected = evaluate(table, self.parsed)
        if not selected.any():
            yield ShardResult(number, None, nulls, task.size)
            return
        shard = dataset.open_shard(number)
        bits = selected
        if shard.selection is not None:  # a view of a view has bits for the whole shard
            bits = np.zeros(entry.details[view.KEY]["documents"], bool)
            bits[shard.selection.documents[selected]] = True
        view_shard = write_shard(
            dataset,
            number,
            self.out,
            ("bits", "bits", view.pack_bits(bits)),
            documents=int(selected.sum()),
            tokens=int(shard.layout.document_tokens[selected].sum()),
        )
        yield ShardResult(number, view_shard, nulls, task.size)


def evaluate(table: Any, where: Where) -> Any:
    """Evaluate an expression on a table's rows; null counts as false."""
    import pyarrow as pa
    from pyarrow.acero import Declaration, ProjectNodeOptions, TableSourceNodeOptions

    if not len(table):
        return np.zeros(0, bool)
    for member in where.members:
        table = table.append_column(member.column, _has_element(table, member))
    source = Declaration("table_source", TableSourceNodeOptions(table))
    options = ProjectNodeOptions([where.expression], ["holds"])
    projection = Declaration.from_sequence([source, Declaration("project", options)])
    column = projection.to_table(use_threads=False).column("holds")
    assert column.type == pa.bool_()
    return column.fill_null(False).to_numpy().astype(bool)


def _has_element(table: Any, member: Member) -> Any:
    """Return, by row, whether the list has the element; null where the list is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = table.column(member.field).combine_chunks()
    elements = pa.table({member.field: pc.list_flatten(lists)})
    matches = evaluate(elements, Where("", member.is_element, frozenset()))
    rows = np.zeros(len(lists), bool)
    rows[pc.list_parent_indices(lists).to_numpy()[matches]] = True
    return pa.array(rows, mask=lists.is_null().to_numpy(zero_copy_only=False))


def select(config: SelectConfig) -> Manifest:
    """Make a view, or add new generations to it; return its manifest."""
    base_url, out = config.dataset.rstrip("/"), config.out.rstrip("/")
    dataset = Dataset(base_url)
    where, base_view = parse(config.where, dataset.manifest.kept_fields), dataset.view
    if base_view is not None and base_view.bins is not None:
        raise MisuseError(
            f"{base_url} is packed: its documents lie in bins",
            hint=f"select documents of {base_view.url}, and pack the view",
        )
    if base_view is not None and base_view.sorted_by is not None:
        raise MisuseError(
            f"{base_url} is sorted, and a selection would not be",
            hint=f"select documents of {base_view.url}, and sort the view",
        )
    return make_view(
        ViewRequest(
            verb="selecting",
            dataset=dataset,
            out=out,
            entry={"where": view.encode_steps(_steps(base_view, where))},
            weights=dataset.manifest.weights,
            worker=SelectWorker(base_url, out, where.text),
            engine=config.engine,
            provenance=lambda nulls: {"counts": _counts(nulls)},
            no_documents=lambda nulls: _no_documents_error(dataset, where, nulls),
        )
    )


def _steps(base_view: View | None, where: Where) -> tuple[str, ...]:
    """Return a view's expressions, in order; `base_view` is its base, if that is a view.

    Two expressions are joined, unless the second one uses `document`: that counts the documents
    chosen by the first.
    """
    if base_view is None:
        return (where.text,)
    if "document" in where.names:
        return (*base_view.steps, where.text)
    *earlier_steps, last_step = base_view.steps
    return (*earlier_steps, f"({last_step}) and ({where.text})")


def _counts(nulls: dict[str, int]) -> dict[str, int]:
    return {f"documents without {name}": count for name, count in sorted(nulls.items()) if count}


def _no_documents_error(dataset: Dataset, where: Where, nulls: dict[str, int]) -> InputError:
    total = sum(generation.documents for generation in dataset.generations)
    null_counts = "".join(f"; {name}: {count:,}" for name, count in _counts(nulls).items())
    return InputError(
        f"no document of {dataset.url} is chosen: 0 of {total:,}{null_counts}",
        where=f"--where {where.text}",
        hint="look at the fields of some documents with `tokenize inspect URL --documents 10`",
    )


def describe_share(manifest: Manifest) -> str:
    """Describe how much of its base a view has, in documents and tokens."""
    documents, tokens = view.base_dataset_totals(manifest)
    share = manifest.tokens / max(1, tokens)
    return (
        f"{manifest.documents:,} of {exact_count(documents, 'documents')}, "
        f"{exact_count(manifest.tokens, 'tokens')} "
        f"({share:.1%})"
    )
