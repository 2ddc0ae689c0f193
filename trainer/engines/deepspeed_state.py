"""Where DeepSpeed keeps the masters and moments: its private fields, read in this file alone.

    ZeRO 0           the parameters themselves, whole on every rank (in fp32 alone)
    ZeRO 1, 2        one flat partition for each group; `_hp_mapping` says what of it is whose
    ZeRO 3           every parameter cut evenly, padded; flat sub-groups; `grad_position`

pyproject.toml pins DeepSpeed's minor version for this file, and tests/trainer proves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ...models.parallel.axes import Axis
from ...models.parallel.sharding import LocalShard
from ..checkpoints.fragments import MASTER, Fragment, keyed
from . import optimizer as adamw

Named = Mapping[str, nn.Parameter]
Parts = Mapping[str, LocalShard]


class State(Protocol):
    def fragments(self) -> list[Fragment]: ...

    def refresh(self) -> None:
        """Bring the weights that compute into line with the masters; collective."""


def find(
    engine: Any, optimizer: torch.optim.Optimizer, parameters: Named, parts: Parts, data: Axis
) -> State:
    stage = int(engine.zero_optimization_stage())
    if stage == 3:
        return _Partitioned(engine.optimizer, optimizer, parameters, parts, data)
    if stage:
        return _Flat(engine.optimizer, optimizer, parameters, parts)
    return _Whole(optimizer, parameters, parts, data)


class _Whole:
    """ZeRO 0: every rank has everything; they take turns in writing it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Named, parts: Parts, data: Axis
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.parts = parts
        self.data = data

    def fragments(self) -> list[Fragment]:
        found = []
        for number, (name, master) in enumerate(self.parameters.items()):
            tensors = {MASTER: master, **adamw.moments(self.optimizer, master)}
            turn = number % self.data.size == self.data.rank
            for kind, tensor in tensors.items():
                found.append(
                    Fragment(
                        key=keyed(kind, name),
                        part=self.parts[name],
                        start=0,
                        data=tensor.detach().view(-1),
                        writes=turn and self.parts[name].stored,
                    )
                )
        return found

    def refresh(self) -> None:
        """The weights that compute are the masters."""


class _Flat:
    """ZeRO 1 and 2: a range of all parameters of a group, laid end to end."""

    def __init__(
        self, zero: Any, optimizer: torch.optim.Optimizer, parameters: Named, parts: Parts
    ) -> None:
        self.zero = zero
        self.optimizer = optimizer
        self.parameters = parameters
        self.parts = parts

    def fragments(self) -> list[Fragment]:
        partitions = [group["params"][0] for group in self.optimizer.param_groups]
        found = []
        for name, parameter in self.parameters.items():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:  # another rank's
                continue
            flat = partitions[mapping.param_group_index]
            address = mapping.hp_fragment_address
            tensors = {MASTER: flat, **adamw.moments(self.optimizer, flat)}
            for kind, tensor in tensors.items():
                found.append(
                    Fragment(
                        key=keyed(kind, name),
                        part=self.parts[name],
                        start=int(mapping.lp_fragment_address.start),
                        data=tensor.detach().narrow(0, address.start, address.numel),
                        writes=self.parts[name].stored,
                    )
                )
        return found

    def refresh(self) -> None:
        self.zero.update_lp_params()


class _Partitioned:
    """ZeRO 3: an even part of every parameter; the last ranks' parts end in padding."""

    def __init__(
        self,
        zero: Any,
        optimizer: torch.optim.Optimizer,
        parameters: Named,
        parts: Parts,
        data: Axis,
    ) -> None:
        self.zero = zero
        self.optimizer = optimizer
        self.parameters = parameters
        self.parts = parts
        self.data = data

    def fragments(self) -> list[Fragment]:
        found = []
        for name, parameter in self.parameters.items():
            group, offset, padded = self.zero.grad_position[self.zero.get_param_id(parameter)]
            start = padded * self.data.rank
            numel = min(padded, parameter.ds_numel - start)  # type: ignore[attr-defined]
            flat = self.zero.fp32_partitioned_groups_flat[group]
            tensors = {MASTER: flat, **adamw.moments(self.optimizer, flat)}
            if numel <= 0:
                continue
            for kind, tensor in tensors.items():
                found.append(
                    Fragment(
                        key=keyed(kind, name),
                        part=self.parts[name],
                        start=start,
                        data=tensor.detach().narrow(0, offset, numel),
                        writes=self.parts[name].stored,
                    )
                )
        return found

    def refresh(self) -> None:
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        persistent = self.zero.persistent_parameters
        if persistent:
            # Small parameters stay gathered on every rank; gathering alone would keep what a
            # used engine has of them.
            for parameter in persistent:
                parameter.partition()
            persistent[0].all_gather(persistent)
