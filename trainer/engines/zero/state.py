"""Location of DeepSpeed's masters, optimizer states and gradients.

Beside experts.py this is the only file that reads DeepSpeed's private fields.

    ZeRO 0           the parameters themselves, whole on every rank (fp32 only)
    ZeRO 1, 2        a flat partition per parameter group; `_hp_mapping` locates a parameter in it
    ZeRO 3           every parameter cut evenly, padded; flat sub-groups; `grad_position`

Gradients, between the last backward pass and the step:

    ZeRO 0                p.grad
    ZeRO 1 fp32, 2        averaged_gradients[group]: tensors that make up the flat partition
    ZeRO 1 bf16           BF16_Optimizer.fp32_groups_gradient_flat_partition[group]
    ZeRO 3                averaged_gradients[sub-group]: a padded tensor for each parameter
    offload_optimizer     .grad of the partitions, which lie in host memory

pyproject.toml pins DeepSpeed's minor version for this file; tests/trainer checks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ....models.parallel.axes import Axis
from ..pieces import Piece

Named = Mapping[str, nn.Parameter]


class ShardedState(ABC):
    @abstractmethod
    def pieces(self) -> list[Piece]:
        """Return this rank's pieces."""

    @abstractmethod
    def gradients(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Return the flat gradient of each piece."""

    @abstractmethod
    def refuse(self) -> None:
        """Make DeepSpeed skip its next step: write NaN into the gradients."""

    @abstractmethod
    def refresh(self) -> None:
        """Compute the weights of the forward pass from the masters. Collective."""


def find(
    engine: Any, optimizer: torch.optim.Optimizer, parameters: Named, data: Axis
) -> ShardedState:
    stage = int(engine.zero_optimization_stage())
    if not stage:
        return _Whole(engine, parameters, data)
    state: ShardedState = _Flat(engine.optimizer, optimizer, parameters)
    if stage == 3:
        state = _Partitioned(engine.optimizer, parameters, data)
    on_host = engine.zero_use_cpu_optimizer()
    return _OnHost(state, engine.optimizer, parameters) if on_host else state


class _Whole(ShardedState):
    """ZeRO 0: every rank holds everything; the ranks take turns in writing it."""

    def __init__(self, engine: Any, parameters: Named, data: Axis) -> None:
        self.engine = engine
        self.parameters = parameters
        self.data = data

    def pieces(self) -> list[Piece]:
        return [
            Piece(
                parameter=name,
                tensor=parameter,
                begin=0,
                start=0,
                numel=parameter.numel(),
                writes=number % self.data.size == self.data.rank,
            )
            for number, (name, parameter) in enumerate(self.parameters.items())
        ]

    def gradients(self, pieces: Sequence[Piece]) -> list[Tensor]:
        for parameter in self.parameters.values():
            if parameter.grad is None:  # unused: it still decays, as under ZeRO
                parameter.grad = torch.zeros_like(parameter)
        found = [self.parameters[piece.parameter].grad for piece in pieces]
        return [gradient.view(-1) for gradient in found if gradient is not None]

    def refuse(self) -> None:
        raise AssertionError("without ZeRO, DeepSpeed applies what it is given")

    def refresh(self) -> None:
        """The weights of the forward pass are the masters."""


class _Flat(ShardedState):
    """ZeRO 1 and 2: a range of all parameters of a group, laid end to end."""

    def __init__(self, zero: Any, optimizer: torch.optim.Optimizer, parameters: Named) -> None:
        self.zero = zero
        self.optimizer = optimizer
        self.parameters = parameters
        self.accumulates = hasattr(zero, "fp32_groups_gradient_flat_partition")
        """True for BF16_Optimizer, which keeps gradients of all parameters on every rank."""

    def pieces(self) -> list[Piece]:
        partitions = [group["params"][0] for group in self.optimizer.param_groups]
        found = []
        for name, parameter in self.parameters.items():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:  # another rank's
                continue
            address = mapping.hp_fragment_address
            found.append(
                Piece(
                    parameter=name,
                    tensor=partitions[mapping.param_group_index],
                    begin=int(address.start),
                    start=int(mapping.lp_fragment_address.start),
                    numel=int(address.numel),
                    writes=True,
                )
            )
        return found

    def gradients(self, pieces: Sequence[Piece]) -> list[Tensor]:
        by_place = []
        for number in range(len(self.optimizer.param_groups)):
            if self.accumulates:
                tensors = [self.zero.fp32_groups_gradient_flat_partition[number]]
            else:
                tensors = self.zero.averaged_gradients[number]
            begins = accumulate((each.numel() for each in tensors), initial=0)
            by_place.append(dict(zip(begins, tensors, strict=False)))
        return [self._gradient(piece, by_place) for piece in pieces]

    def _gradient(self, piece: Piece, by_place: Sequence[Mapping[int, Tensor]]) -> Tensor:
        mapping: Any = self.parameters[piece.parameter]._hp_mapping  # type: ignore[attr-defined]
        group: int = mapping.param_group_index
        if self.accumulates:
            return by_place[group][0].narrow(0, piece.begin, piece.numel)
        found = by_place[group][piece.begin].view(-1)
        assert len(found) == piece.numel, "DeepSpeed cuts gradients and masters alike"
        return found

    def refuse(self) -> None:
        if self.accumulates:  # each rank decides by what it has: some have padding alone
            gradients = self.zero.fp32_groups_gradients_flat
        else:
            gradients = self.gradients(self.pieces())
        for gradient in gradients:
            gradient.fill_(torch.nan)

    def refresh(self) -> None:
        self.zero.update_lp_params()


class _Partitioned(ShardedState):
    """ZeRO 3: an even part of every parameter; the last ranks' parts end in padding."""

    def __init__(self, zero: Any, parameters: Named, data: Axis) -> None:
        self.zero = zero
        self.parameters = parameters
        self.data = data

    def pieces(self) -> list[Piece]:
        found = []
        for name, parameter in self.parameters.items():
            group, offset, padded = self.zero.grad_position[self.zero.get_param_id(parameter)]
            start = padded * self.data.rank
            numel = min(padded, parameter.ds_numel - start)  # type: ignore[attr-defined]
            if numel > 0:
                found.append(
                    Piece(
                        parameter=name,
                        tensor=self.zero.fp32_partitioned_groups_flat[group],
                        begin=int(offset),
                        start=start,
                        numel=numel,
                        writes=True,
                    )
                )
        return found

    def gradients(self, pieces: Sequence[Piece]) -> list[Tensor]:
        padded: dict[int, Tensor] = {}
        for number, group in enumerate(self.zero.fp16_groups):
            members = map(id, group)
            padded.update(zip(members, self.zero.averaged_gradients[number], strict=True))
        found = [padded[id(self.parameters[piece.parameter])] for piece in pieces]
        return [
            gradient.view(-1).narrow(0, 0, piece.numel)
            for gradient, piece in zip(found, pieces, strict=True)
        ]

    def refuse(self) -> None:
        # Not the padding: DeepSpeed's buffer would keep NaN there.
        for gradient in self.gradients(self.pieces()):
            gradient.fill_(torch.nan)

    def refresh(self) -> None:
        self.zero.invalidate_secondary_tensor()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        persistent = self.zero.persistent_parameters
        if persistent:
            # Small parameters stay gathered on every rank. Without `partition`, the gather would
            # keep the values of before.
            for parameter in persistent:
                parameter.partition()
            persistent[0].all_gather(persistent)


class _OnHost(ShardedState):
    """offload_optimizer: DeepSpeed copies the gradients to its partitions in host memory, notes a
    norm of each, and judges the step by these."""

    def __init__(self, state: ShardedState, zero: Any, parameters: Named) -> None:
        self.state = state
        self.zero = zero
        self.parameters = parameters

    def pieces(self) -> list[Piece]:
        return self.state.pieces()

    def gradients(self, pieces: Sequence[Piece]) -> list[Tensor]:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the copies are asynchronous
        found = []
        for piece in pieces:
            assert piece.tensor.grad is not None, "DeepSpeed allocates it once"
            gradient = piece.tensor.grad.view(-1).narrow(0, piece.begin, piece.numel)
            number = self.zero.get_param_id(self.parameters[piece.parameter])
            if number not in self.zero.norm_for_param_grads:
                gradient.zero_()  # unused: this is the gradient of an earlier step
            found.append(gradient)
        return found

    def refuse(self) -> None:
        self.zero.local_overflow = True
        norms = self.zero.norm_for_param_grads
        norms.update({key: torch.full_like(norm, torch.nan) for key, norm in norms.items()})
        # The sums of ZeRO-2 on the device, which DeepSpeed would keep for the next step.
        self.zero.averaged_gradients = dict.fromkeys(self.zero.averaged_gradients)

    def refresh(self) -> None:
        self.state.refresh()
