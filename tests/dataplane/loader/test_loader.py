from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.small_data import plan_of, random_documents, write_dataset

from headrace.console.errors import ConfigError, IntegrityError, UserError
from headrace.dataplane.loader.batch import PADDING, Batch
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.loader.rows import RowReader
from headrace.dataplane.order.plan import Plan


def steps_of(plan: Plan, *, world: int = 1, **options: int) -> list[list[bytes]]:
    """Load the plan with `world` ranks; return the digests of each step's rows in global order."""
    iterators = [iter(Loader(plan, rank=r, world=world, **options)) for r in range(world)]  # type: ignore[arg-type]
    start = options.get("start_step", plan.first_step)
    steps = []
    for _ in range(start, plan.end_step):
        batches = [next(iterator) for iterator in iterators]
        assert len({len(part) for part in batches}) == 1, "ranks differ in micro-batches"
        steps.append([digest for part in batches for batch in part for digest in batch.digests])
    assert all(next(iterator, None) is None for iterator in iterators)
    return steps


@given(
    world=st.integers(1, 64),
    micro_batch=st.integers(1, 8),
    part=st.floats(0, 1, exclude_max=True),
    workers=st.integers(0, 2),
)
@settings(max_examples=12)
def test_the_order_does_not_depend_on_world_size_batches_workers_or_restarts(
    changing: Plan, world: int, micro_batch: int, part: float, workers: int
) -> None:
    expected = steps_of(changing, micro_batch=4)
    start = int(part * changing.end_step)
    options = {"micro_batch": micro_batch, "workers": workers}
    seen = steps_of(changing, world=world, start_step=start, **options)
    assert seen == expected[start:]


def test_another_seed_gives_another_order(two_phases: Plan) -> None:
    reseeded = replace(
        two_phases,
        sources=tuple(
            replace(source, order=replace(source.order, seed=8)) for source in two_phases.sources
        ),
    )
    assert steps_of(reseeded, micro_batch=4) != steps_of(two_phases, micro_batch=4)


def test_batches_match_the_documents(changing: Plan) -> None:
    """Tokens, boundaries, masks and positions, compared with the documents themselves."""
    corpora = {
        name: np.concatenate(random_documents(sum(map(ord, name)), count))
        for name, count in (("web", 60), ("code", 30))
    }
    reader = RowReader(changing)
    for batches in Loader(changing, micro_batch=5):
        for batch in batches:
            check_batch(batch, reader, corpora, [s.name for s in changing.sources])


def check_batch(
    batch: Batch, reader: RowReader, corpora: dict[str, np.ndarray], names: list[str]
) -> None:
    rows, length = batch.tokens.shape
    bounds = set(batch.cu_seqlens.tolist())
    assert {0, rows * length} <= bounds
    for number in range(rows):
        if batch.rows[number] == PADDING:
            assert batch.weights[number].sum() == 0
            continue
        located = reader.stream.locate(batch.rows[number : number + 1])
        spans = located.spans(0)
        corpus = corpora[names[batch.sources[number]]]
        tokens = np.concatenate([corpus[start:end] for start, end in spans])
        assert batch.tokens[number].tolist() == tokens.tolist()
        assert batch.targets[number].tolist() == [*tokens[1:].tolist(), corpus[spans[-1][1]]]
        ends = tokens == 0
        ends[np.cumsum([end - start for start, end in spans])[:-1] - 1] = True
        assert ((batch.weights[number] == 0).numpy() == ends).all()
        begins = {number * length} | {
            number * length + place + 1 for place in np.flatnonzero(ends) if place + 1 < length
        }
        assert begins == {b for b in bounds if number * length <= b < (number + 1) * length}
        position = -1
        for place in range(length):
            position = 0 if number * length + place in begins else position + 1
            assert batch.positions[number, place] == position


def test_without_isolation_documents_are_not_separated(two_phases: Plan) -> None:
    plan = replace(two_phases, isolate_documents=False)
    batch = next(iter(Loader(plan, micro_batch=4)))[0]
    assert batch.cu_seqlens.tolist() == [0, 64, 128, 192, 256]
    assert bool((batch.weights == 1).all())


def test_without_isolation_only_joints_of_spans_are_masked(changing: Plan) -> None:
    plan = replace(changing, isolate_documents=False)
    reader, joints = RowReader(plan), 0
    for phase in plan.phases:
        located = reader.stream.locate(np.arange(phase.first_row, phase.end_row))
        weights = reader.read(reader.find(located)).arrays.weights
        for place in range(phase.rows):
            sizes = [end - start for start, end in located.spans(place)]
            masked = [sum(sizes[:number]) - 1 for number in range(1, len(sizes))]
            assert np.flatnonzero(weights[place] == 0).tolist() == masked
            joints += len(masked)
    assert joints


def test_loss_weights_come_from_the_weight_table(tmp_path: Path) -> None:
    documents = random_documents(3, 80)
    mixed = [number % 20 < 5 for number in range(80)]  # rows between have one code, 0
    codes = [
        np.arange(len(document)) % 3 * some for document, some in zip(documents, mixed, strict=True)
    ]
    table = (0.7, 0.5, 0.1)
    url = str(tmp_path / "dna")
    write_dataset(url, documents, codes=codes, weight_table=table)
    plan = lengths_of_one_source(url)
    flat, code = np.concatenate(documents), np.concatenate(codes)
    several = alike = 0
    reader = RowReader(plan)
    for batches in Loader(plan, micro_batch=4):
        for batch in batches:
            for number, row in enumerate(batch.rows):
                if row == PADDING:
                    continue
                spans = reader.stream.locate(np.array([row])).spans(0)
                parts = []
                for start, end in spans:
                    weights = np.array(table, np.float32)[code[start + 1 : end + 1]]
                    alike += not code[start + 1 : end + 1].any()
                    weights[flat[start:end] == 0] = 0
                    weights[-1] *= end == spans[-1][1]
                    parts.append(weights)
                assert np.array_equal(batch.weights[number].numpy(), np.concatenate(parts))
                several += len(spans) > 1
    assert several and alike


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["flip", "truncate", "append", "remove"])
def test_a_damaged_shard_is_named(dataset: Callable[..., str], workers: int, damage: str) -> None:
    url = dataset("web", count=300)
    plan = one_source(url)
    shard = sorted(Path(url, "shards").iterdir())[1]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "flip":
        shard.write_bytes(data)
    elif damage == "truncate":
        shard.write_bytes(data[:-100])
    elif damage == "append":
        data[len(data) // 2] ^= 1
        shard.write_bytes(data + b"x")
    else:
        shard.unlink()
    with pytest.raises(UserError) as caught:
        for _ in Loader(plan, micro_batch=4, workers=workers):
            pass
    assert shard.name in str(caught.value)
    assert caught.value.hint
    assert damage == "remove" or isinstance(caught.value, IntegrityError)


def test_tensors_have_the_dtypes_of_models(two_phases: Plan) -> None:
    batch = next(iter(Loader(two_phases, micro_batch=4)))[0]
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.weights.dtype == torch.float32
    assert batch.cu_seqlens.dtype == batch.positions.dtype == torch.int32


@pytest.mark.parametrize("size", [1, 2, 8])
def test_context_ranks_split_a_row(two_phases: Plan, size: int) -> None:
    parts = [
        Loader(two_phases, micro_batch=5, context_rank=rank, context_size=size)
        for rank in range(size)
    ]
    for whole, *cut in zip(Loader(two_phases, micro_batch=5), *parts, strict=True):
        for batch, *parts_of_batch in zip(whole, *cut, strict=True):
            for name in ("tokens", "targets", "weights", "positions"):
                joined = torch.cat([getattr(part, name) for part in parts_of_batch], dim=1)
                assert torch.equal(joined, getattr(batch, name)), name
            assert all(torch.equal(part.cu_seqlens, batch.cu_seqlens) for part in parts_of_batch)
            assert all(part.digests == batch.digests for part in parts_of_batch)


def test_a_row_that_cannot_be_cut_is_refused(two_phases: Plan) -> None:
    with pytest.raises(ConfigError, match="64 tokens cannot be cut into 3"):
        Loader(two_phases, micro_batch=1, context_size=3)


@pytest.mark.parametrize("step", [-1, 10**6])
def test_a_step_outside_the_plan_is_refused(two_phases: Plan, step: int) -> None:
    with pytest.raises(ConfigError, match=f"step {step} is not in the plan"):
        Loader(two_phases, micro_batch=1, start_step=step)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_pinned_memory_without_a_device_is_refused(two_phases: Plan) -> None:
    with pytest.raises(ConfigError, match="pin_memory: no CUDA device"):
        Loader(two_phases, micro_batch=1, pin_memory=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_pinned_batches_equal_others(two_phases: Plan) -> None:
    pairs = zip(
        Loader(two_phases, micro_batch=4, pin_memory=True),
        Loader(two_phases, micro_batch=4),
        strict=True,
    )
    for pinned, plain in ((left[0], right[0]) for left, right in pairs):
        assert pinned.tokens.is_pinned()
        for name in ("tokens", "targets", "weights"):
            assert torch.equal(getattr(pinned, name), getattr(plain, name))


def test_a_rank_outside_the_world_is_refused(two_phases: Plan) -> None:
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Loader(two_phases, micro_batch=1, rank=2, world=2)


def lengths_of_one_source(url: str) -> Plan:
    phases = {"a": (4_000, 16), "b": (4_000, 64), "c": (12_000, 32)}
    return plan_of(
        {
            "chunk": 256,
            "window": 6,
            "sources": {"one": {"data": url, "max_epochs": 2}},
            "phases": {
                name: {"tokens": tokens, "seq_len": length, "batch": 512, "weights": {"one": 1}}
                for name, (tokens, length) in phases.items()
            },
        }
    )


def one_source(url: str) -> Plan:
    return plan_of(
        {
            "chunk": 1024,
            "window": 4,
            "sources": {"one": {"data": url}},
            "phases": {
                "all": {"tokens": 9_000, "seq_len": 64, "batch": 512, "weights": {"one": 1}}
            },
        }
    )
