"""Changes of DeepSpeed's private parts, which split experts must name (see layouts.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from torch import nn

from headrace.console.errors import MissingError


@contextmanager
def no_groups() -> Iterator[None]:
    """The dictionary of the experts' process groups has another name."""
    from deepspeed.utils import groups

    with mock.patch.dict(vars(groups)):
        del vars(groups)["_EXPERT_PARALLEL_GROUP"]
        yield


@contextmanager
def other_groups() -> Iterator[None]:
    """The groups are read from another place than the one that headrace fills."""
    from deepspeed.utils import groups

    empty: dict[str, Any] = {}
    with (
        mock.patch.object(groups, "_get_expert_data_parallel_group_dict", lambda: empty),
        mock.patch.object(groups, "_get_expert_data_parallel_group", empty.__getitem__),
    ):
        yield


@contextmanager
def other_class() -> Iterator[None]:
    """Layers with experts are of another class."""
    from deepspeed.runtime import engine

    with mock.patch.object(engine, "MoE", nn.Bilinear):
        yield


CHANGES: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "no groups": no_groups,
    "other groups": other_groups,
    "other class": other_class,
}


def answers(start: Callable[[], Any]) -> dict[str, str]:
    """Start an engine under each change. Return its errors, or "starts"."""
    result = {}
    for change, patched in CHANGES.items():
        with patched():
            try:
                start()
                result[change] = "starts"
            except MissingError as error:
                result[change] = str(error)
    return result
