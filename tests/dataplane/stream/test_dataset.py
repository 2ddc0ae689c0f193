"""A torch dataset of the stream: exact with any torch workers, over states, ranks and libraries."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.small_data import plan_of, random_documents, write_dataset
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from headrace.console.errors import ConfigError, PlanError
from headrace.dataplane import Stream
from headrace.dataplane.loader.batch import PADDING
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.order.plan import Decision, Plan
from headrace.dataplane.stream.dataset import IGNORED, Names, StreamDataset

Rows = list[tuple[int, list[int], bytes]]
"""Step, rows and tokens of each micro-batch."""


def summarize(items: Iterable[dict[str, Any]]) -> Rows:
    return [
        (
            int(item["step"]),
            item["rows"].tolist(),
            item["tokens"][item["rows"] != PADDING].numpy().tobytes(),
        )
        for item in items
    ]


def load(dataset: StreamDataset, workers: int = 0) -> DataLoader:
    return DataLoader(dataset, batch_size=None, num_workers=workers)


def by_step(rows: Iterable[Rows]) -> dict[int, dict[int, bytes]]:
    """Merge the micro-batches of ranks: tokens by row, by step. Each row is there once."""
    steps: dict[int, dict[int, bytes]] = {}
    for step, numbers, tokens in (item for part in rows for item in part):
        numbers = [number for number in numbers if number != PADDING]
        size = len(tokens) // max(1, len(numbers))
        for index, number in enumerate(numbers):
            assert number not in steps.setdefault(step, {})
            steps[step][number] = tokens[index * size : (index + 1) * size]
    return steps


def test_items_are_the_loaders_batches(changing: Plan) -> None:
    loader = Loader(changing, micro_batch=3, rank=1, world=2)
    items = iter(Stream(changing).dataset(1, 2, micro_batch=3))
    for step, batches in zip(loader.steps, loader, strict=True):
        for batch in batches:
            item = next(items)
            assert (item["step"], item["rows"].tolist()) == (step, batch.rows.tolist())
            for name in ("tokens", "targets", "weights", "positions", "cu_seqlens"):
                assert torch.equal(item[name], getattr(batch, name))
    assert next(items, None) is None


@given(world=st.integers(1, 5), micro_batch=st.integers(1, 4), workers=st.integers(1, 5))
@settings(max_examples=25)
def test_workers_take_turns(changing: Plan, world: int, micro_batch: int, workers: int) -> None:
    """The parts of all workers, taken in turns, are what one process reads; len counts them."""
    from headrace.dataplane.stream.dataset import Place, WorkerRows

    dataset = StreamDataset(changing, micro_batch=micro_batch, rank=world - 1, world=world)

    def places(skipped: int, num_workers: int) -> list[Place]:
        rows = WorkerRows(
            plan=changing,
            rank=world - 1,
            world=world,
            start_step=2,
            digests=False,
            group_bytes=0,
            micro_batch=micro_batch,
            first_index=0,
            skipped=skipped,
            workers=num_workers,
        )
        assert len(list(rows.groups())) == len(list(rows.places()))
        return list(rows.places())

    whole = places(0, 1)
    parts = [places(number, workers) for number in range(workers)]
    turns = [parts[turn % workers][turn // workers] for turn in range(len(whole))]
    assert turns == whole and sum(map(len, parts)) == len(whole)
    dataset.load_state_dict({"plan": changing.hash, "step": 2})
    assert len(dataset) == len(whole)


def test_a_data_loader_with_workers_gives_the_same_items_in_the_same_order(changing: Plan) -> None:
    dataset = Stream(changing).dataset(0, 2, micro_batch=3)
    expected = summarize(dataset)
    assert summarize(load(Stream(changing).dataset(0, 2, micro_batch=3), workers=3)) == expected
    assert len(load(Stream(changing).dataset(0, 2, micro_batch=3))) == len(expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_pass_begins_where_the_first_one_did(changing: Plan, workers: int) -> None:
    dataset = Stream(changing).dataset(micro_batch=6)
    dataset.load_state_dict({"plan": changing.hash, "step": changing.end_step - 4})
    loader = load(dataset, workers)
    first = summarize(loader)
    assert first and summarize(loader) == first and len(loader) == len(first)


@pytest.mark.parametrize(("workers", "taken"), [(0, 11), (2, 11), (2, 1)])
def test_a_stateful_data_loader_goes_on_within_a_step(
    changing: Plan, workers: int, taken: int
) -> None:
    """Stop after some micro-batches, with those that workers read ahead; load in a new loader.
    After one, the second worker has given none yet."""

    def new() -> StatefulDataLoader:
        dataset = Stream(changing).dataset(micro_batch=3)
        stay = {"persistent_workers": workers > 0}
        return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **stay)

    whole = summarize(Stream(changing).dataset(micro_batch=3))
    loader = new()
    iterator = iter(loader)
    first = summarize(next(iterator) for _ in range(taken))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    loader = new()
    loader.load_state_dict(state)
    assert first + summarize(loader) == whole
    # The second pass: workers that stay begin it where their own dataset does, in its order.
    assert summarize(loader) == (whole if workers else whole[taken:])


@pytest.mark.parametrize("worlds", [(1, 3), (3, 2)])
def test_a_state_between_steps_holds_for_any_ranks(changing: Plan, worlds: Sequence[int]) -> None:
    """Stop after a step, and go on with other ranks, micro-batches and workers."""
    before, after = worlds
    step = changing.end_step // 2
    whole = by_step([summarize(Stream(changing).dataset(0, 1, micro_batch=2))])
    parts, states = [], []
    for rank in range(before):
        dataset = Stream(changing).dataset(rank, before, micro_batch=2)
        items = iter(dataset)
        parts.append([])
        while dataset.state_dict()["step"] < step:
            parts[-1] += summarize([next(items)])
        states.append(dataset.state_dict())
    assert all(state == {"plan": changing.hash, "step": step, "index": 0} for state in states)
    for rank in range(after):
        dataset = Stream(changing).dataset(rank, after, micro_batch=3)
        dataset.load_state_dict(states[0])
        parts.append(summarize(dataset))
    assert by_step(parts) == whole


def test_states_that_do_not_hold_are_refused(changing: Plan) -> None:
    dataset = Stream(changing).dataset(0, 2, micro_batch=1)
    items = iter(dataset)
    next(items)
    state = dataset.state_dict()
    assert state["index"] == 1
    for wrong, words in (
        ({"plan": "0" * 32}, "belongs to the plan"),
        ({"step": changing.end_step + 1}, "is not in the plan"),
        ({"world": 3}, "within step 0, on 3 ranks"),
        ({"micro_batch": 2}, "micro-batches of 2 rows"),
        ({"worker": [1, 2]}, "torch worker 1 of 2"),
    ):
        with pytest.raises(PlanError, match=words):
            dataset.load_state_dict(state | wrong)
    for options in ({"micro_batch": 0}, {"rank": 2, "world": 2}, {"names": "hf"}):
        with pytest.raises(ConfigError):
            Stream(changing).dataset(**options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="both rank and world"):
        Stream(changing).dataset(1)


def test_a_state_after_a_decision_holds_with_that_decision_alone(changing: Plan) -> None:
    """A loop over a run's rows may have read rows for which the run then decides other shares."""

    def decided(*steps: int) -> StreamDataset:
        result = [
            Decision(row=changing.step(step).first_row, weights=(1, 2), digest=f"{step:032x}")
            for step in steps
        ]
        return Stream(replace(changing, decisions=tuple(result))).dataset()

    state = decided(2).state_dict(step=4)
    decided(2, 4).load_state_dict(state)
    for steps in ((), (3,), (2, 3)):
        with pytest.raises(PlanError, match="read by other decisions"):
            decided(*steps).load_state_dict(state)
    for state in (decided(2).state_dict(step=2), decided().state_dict(step=2)):
        assert "decision" not in state
        decided(2).load_state_dict(state)
    with pytest.raises(PlanError, match="read by other decisions"):
        decided(2).load_state_dict({**decided().state_dict(step=2), "index": 1})


def test_a_mixture_a_plan_and_a_run_are_opened_by_name(changing: Plan, tmp_path: Path) -> None:
    changing.save(tmp_path / "plan.json")
    for name in (tmp_path / "plan.json", str(tmp_path), changing):
        stream = Stream(name)
        assert stream.hash == changing.hash
        assert stream.steps == range(changing.first_step, changing.end_step)


def test_names_of_transformers_carry_the_targets_within_a_row(changing: Plan) -> None:
    pairs = zip(
        Stream(changing).dataset(micro_batch=2),
        Stream(changing).dataset(micro_batch=2, names="transformers"),
        strict=True,
    )
    for ours, theirs in pairs:
        has_loss = ours["weights"][:, :-1] > 0
        assert torch.equal(theirs["input_ids"], ours["tokens"])
        assert torch.equal(theirs["labels"][:, 1:] != IGNORED, has_loss)
        assert torch.equal(theirs["labels"][:, 1:][has_loss], ours["targets"][:, :-1][has_loss])
        assert torch.equal(theirs["position_ids"], ours["positions"].long())


def test_names_of_torchtitan_and_megatron(changing: Plan) -> None:
    """Neither shifts the labels; Megatron's mask hides later tokens and other documents."""
    sets = [Stream(changing).dataset(micro_batch=2, names=names) for names in get_args(Names)]
    for ours, _, (inputs, labels), theirs in zip(*sets, strict=True):
        assert torch.equal(inputs["input"], ours["tokens"])
        assert torch.equal(inputs["positions"], ours["positions"].long())
        assert torch.equal(labels == IGNORED, ours["weights"] == 0)
        assert torch.equal(labels[labels != IGNORED], ours["targets"][labels != IGNORED])
        assert torch.equal(theirs["labels"], ours["targets"])
        assert torch.equal(theirs["loss_mask"], ours["weights"])
        documents = (theirs["position_ids"] == 0).cumsum(1)
        sees = (documents[:, :, None] == documents[:, None, :]).tril()
        assert torch.equal(theirs["attention_mask"], ~sees[:, None])


def test_labels_of_transformers_carry_no_weights_between_0_and_1(tmp_path: Path) -> None:
    documents = random_documents(1, 20)
    codes = [np.full(len(document), 1, np.uint8) for document in documents]
    write_dataset(str(tmp_path / "dna"), documents, codes=codes, weight_table=(1.0, 0.1))
    phase = {"tokens": 256, "seq_len": 16, "batch": 64, "weights": {"dna": 1}}
    plan = plan_of({"sources": {"dna": {"data": str(tmp_path / "dna")}}, "phases": {"one": phase}})
    next(iter(Stream(plan).dataset()))
    with pytest.raises(ConfigError, match="no loss weight but 0 and 1"):
        next(iter(Stream(plan).dataset(names="transformers")))
