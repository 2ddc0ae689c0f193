"""Plans that were saved before version 4 keep their order to the bit.

`saved/` holds plans of versions 2 and 3 with rows of several lengths, and plans that continue them
with other chunks and grown datasets, as the headrace of that time wrote them. Their digests were
computed by its code.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream

SAVED = Path(__file__).parent / "saved"
ORDERS = {
    "whole-2": ("7e3711ced10ab3b167dd88a1a19465db", "c01c60dd427d55315751c2d3123a5c5e"),
    "continued-2": ("33316dfbb66a3531c17577c624690c7a", "4900d7a1be7d8fa0740b807474e2fdb4"),
    "whole-3": ("51a37a26545b48fb1a184d90dddbd18d", "6a15f4de2901cca25c5f7ba92d0f3e7f"),
    "continued-3": ("eba21176dfbe91a99a42bf9a89c54ed9", "e8bd49a948278781457867be17b577b1"),
}
"""Hash of each plan, and digest of the source, epoch and first token of all its rows."""


def digest(plan: Plan) -> str:
    state, stream = hashlib.blake2b(digest_size=16), Stream(plan)
    for phase in plan.phases:
        located = stream.locate(np.arange(phase.first_row, phase.last_row))
        assert not located.pieces
        for values in (located.sources, located.epochs, located.tokens):
            state.update(values.astype("<i8").tobytes())
    return state.hexdigest()


@pytest.mark.parametrize("name", ORDERS)
def test_a_plan_of_an_earlier_version_keeps_its_order(name: str, tmp_path: Path) -> None:
    plan = Plan.load(SAVED / f"{name}.json")
    assert (plan.hash, digest(plan)) == ORDERS[name]
    plan.save(tmp_path / "again.json")
    assert Plan.load(tmp_path / "again.json") == plan
    first, *others = plan.sources
    other = replace(first, order=replace(first.order, seed=first.order.seed + 1))
    assert digest(replace(plan, sources=(other, *others))) != ORDERS[name][1]
