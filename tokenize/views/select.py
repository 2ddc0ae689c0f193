"""`tokenize select`: a view of the documents that an expression chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...console.errors import InputError, MisuseError
from ...dataplane.datasets import view
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.datasets.manifest import Manifest
from ...dataplane.datasets.view import View
from ..executors import ExecutorConfig
from .making import MadeShard, Making, ShardTask, made_shard, make
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
    """Evaluates an expression over the documents of a shard, and writes a file of bits."""

    dataset: str
    out: str
    where: str

    @cached_property
    def opened(self) -> Dataset:
        return Dataset(self.dataset)

    @cached_property
    def parsed(self) -> Where:
        return parse(self.where, self.opened.manifest.kept_fields)

    def __call__(self, task: ShardTask) -> Iterator[MadeShard]:
        dataset, number = self.opened, task.number
        shard = dataset.shards[number]
        first = int(dataset.shard_documents[number])
        names = sorted(self.parsed.names)
        table = dataset.columns(first, first + shard.documents, names)
        nulls = {name: table.column(name).null_count for name in names}
        chosen = holds(table, self.parsed)
        if not chosen.any():
            yield MadeShard(number, None, nulls, task.size)
            return
        opened = dataset.open_shard(number)
        whole = chosen
        if opened.selection is not None:  # a view of a view has the bits of the whole shard
            whole = np.zeros(shard.details[view.KEY]["documents"], bool)
            whole[opened.selection.documents[chosen]] = True
        made = made_shard(
            dataset,
            number,
            self.out,
            ("bits", "bits", view.bits_of(whole)),
            documents=int(chosen.sum()),
            tokens=int(opened.layout.document_tokens[chosen].sum()),
        )
        yield MadeShard(number, made, nulls, task.size)


def holds(table: Any, where: Where) -> Any:
    """Return for each row of a table whether an expression holds."""
    import pyarrow as pa
    from pyarrow.acero import Declaration, ProjectNodeOptions, TableSourceNodeOptions

    if not len(table):
        return np.zeros(0, bool)
    for member in where.members:
        table = table.append_column(member.column, _has_element(table, member))
    source = Declaration("table_source", TableSourceNodeOptions(table))
    options = ProjectNodeOptions([where.expression], ["holds"])
    made = Declaration.from_sequence([source, Declaration("project", options)])
    column = made.to_table(use_threads=False).column("holds")
    assert column.type == pa.bool_()
    return column.fill_null(False).to_numpy().astype(bool)


def _has_element(table: Any, member: Member) -> Any:
    """Return for each row of a table whether its list has an element; null where it is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = table.column(member.field).combine_chunks()
    elements = pa.table({member.field: pc.list_flatten(lists)})
    matches = holds(elements, Where("", member.is_element, frozenset()))
    rows = np.zeros(len(lists), bool)
    rows[pc.list_parent_indices(lists).to_numpy()[matches]] = True
    return pa.array(rows, mask=lists.is_null().to_numpy(zero_copy_only=False))


def select(config: SelectConfig) -> Manifest:
    """Make a view, or add new generations to it; return its manifest."""
    base, out = config.dataset.rstrip("/"), config.out.rstrip("/")
    dataset = Dataset(base)
    where, over = parse(config.where, dataset.manifest.kept_fields), dataset.view
    if over is not None and over.bins is not None:
        raise MisuseError(
            f"{base} is packed: its documents lie in bins",
            hint=f"select documents of {over.url}, and pack the view",
        )
    return make(
        Making(
            verb="selecting",
            dataset=dataset,
            out=out,
            entry={"where": view.recorded(_steps(over, where))},
            weights=dataset.manifest.weights,
            worker=SelectWorker(base, out, where.text),
            engine=config.engine,
            provenance=lambda nulls: {"counts": _counts(nulls)},
            nothing=lambda nulls: _empty(dataset, where, nulls),
        )
    )


def _steps(over: View | None, where: Where) -> tuple[str, ...]:
    """Return the expressions of a view of a dataset or of the view `over`. Two expressions are
    joined unless the second one counts the documents that the first has chosen: then both are
    needed, in order."""
    if over is None:
        return (where.text,)
    if "document" in where.names:
        return (*over.steps, where.text)
    *before, last = over.steps
    return (*before, f"({last}) and ({where.text})")


def _counts(nulls: dict[str, int]) -> dict[str, int]:
    return {f"documents without {name}": count for name, count in sorted(nulls.items()) if count}


def _empty(dataset: Dataset, where: Where, nulls: dict[str, int]) -> InputError:
    total = sum(made.documents for made in dataset.generations)
    listed = "".join(f"; {name}: {count:,}" for name, count in _counts(nulls).items())
    return InputError(
        f"no document of {dataset.url} is chosen: 0 of {total:,}{listed}",
        where=f"--where {where.text}",
        hint="look at the fields of some documents with `tokenize inspect URL --documents 10`",
    )


def share_of(held: Manifest) -> str:
    """Return how much of its dataset a view has."""
    documents, tokens = view.documents_of(held)
    share = held.tokens / max(1, tokens)
    return f"{held.documents:,} of {documents:,} documents, {held.tokens:,} tokens ({share:.1%})"
