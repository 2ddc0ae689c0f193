"""Locate DeepSpeed's masters, optimizer states and gradients.

Only this file and experts.py read DeepSpeed's private fields.

    ZeRO 0           the parameters themselves, replicated (fp32 only)
    ZeRO 1, 2        a flat partition per parameter group; `_hp_mapping` locates a parameter in it
    ZeRO 3           parameters cut evenly, padded; flat sub-groups; `grad_position`

Gradients, between the last backward pass and the step:

    ZeRO 0                p.grad
    ZeRO 1 fp32, 2        averaged_gradients[group]: consecutive tensors of the flat partition
    ZeRO 1 bf16           BF16_Optimizer.fp32_groups_gradient_flat_partition[group]
    ZeRO 3                averaged_gradients[sub-group]: a padded tensor per parameter
    offload_optimizer     .grad of the partitions, in host memory

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
from ..pieces import ParameterPiece

Named = Mapping[str, nn.Parameter]


class ShardedState(ABC):
    @abstractmethod
    def pieces(self) -> list[ParameterPiece]:
        """Return this rank's pieces."""

    @abstractmethod
    def gradients(self, pieces: Sequence[ParameterPiece]) -> list[Tensor]:
        """Return the pieces' flat gradients."""

    @abstractmethod
    def refuse(self) -> None:
        """Make DeepSpeed skip the next step: write NaN into the gradients."""

    @abstractmethod
    def refresh(self) -> None:
        """Compute the weights of the forward pass from the masters. Collective."""


def find(
    engine: Any, optimizer: torch.optim.Optimizer, parameters: Named, data: Axis
) -> ShardedState:
    """Return the state of a DeepSpeed engine, by its ZeRO stage."""
    stage = int(engine.zero_optimization_stage())
    if not stage:
        return _Replicated(engine, parameters, data)
    state: ShardedState = _Flat(engine.optimizer, optimizer, parameters)
    if stage == 3:
        state = _Partitioned(engine.optimizer, parameters, data)
    on_host = engine.zero_use_cpu_optimizer()
    return _OnHost(state, engine.optimizer, parameters) if on_host else state


class _Replicated(ShardedState):
    """ZeRO 0: all ranks hold all parameters, and take turns in writing them."""

    def __init__(self, engine: Any, parameters: Named, data: Axis) -> None:
        self.engine = engine
        self.parameters = parameters
        self.data = data

    def pieces(self) -> list[ParameterPiece]:
        return [
            ParameterPiece(
                parameter=name,
                tensor=parameter,
                begin=0,
                start=0,
                numel=parameter.numel(),
                writes=number % self.data.size == self.data.rank,
            )
            for number, (name, parameter) in enumerate(self.parameters.items())
        ]

    def gradients(self, pieces: Sequence[ParameterPiece]) -> list[Tensor]:
        for parameter in self.parameters.values():
            if parameter.grad is None:  # an unused parameter still decays, as under ZeRO
                parameter.grad = torch.zeros_like(parameter)
        gradients = [self.parameters[piece.parameter].grad for piece in pieces]
        return [gradient.view(-1) for gradient in gradients if gradient is not None]

    def refuse(self) -> None:
        raise AssertionError("without ZeRO, DeepSpeed applies what it is given")

    def refresh(self) -> None:
        """The weights of the forward pass are the masters."""


class _Flat(ShardedState):
    """ZeRO 1 and 2: a range of a group's concatenated parameters."""

    def __init__(self, zero: Any, optimizer: torch.optim.Optimizer, parameters: Named) -> None:
        self.zero = zero
        self.optimizer = optimizer
        self.parameters = parameters
        self.accumulates = hasattr(zero, "fp32_groups_gradient_flat_partition")
        """True for BF16_Optimizer, which accumulates unsharded gradients."""

    def pieces(self) -> list[ParameterPiece]:
        partitions = [group["params"][0] for group in self.optimizer.param_groups]
        pieces = []
        for name, parameter in self.parameters.items():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:  # on other ranks
                continue
            address = mapping.hp_fragment_address
            pieces.append(
                ParameterPiece(
                    parameter=name,
                    tensor=partitions[mapping.param_group_index],
                    begin=int(address.start),
                    start=int(mapping.lp_fragment_address.start),
                    numel=int(address.numel),
                    writes=True,
                )
            )
        return pieces

    def gradients(self, pieces: Sequence[ParameterPiece]) -> list[Tensor]:
        gradients_by_begin = []
        for number in range(len(self.optimizer.param_groups)):
            if self.accumulates:
                tensors = [self.zero.fp32_groups_gradient_flat_partition[number]]
            else:
                tensors = self.zero.averaged_gradients[number]
            begins = accumulate((tensor.numel() for tensor in tensors), initial=0)
            gradients_by_begin.append(dict(zip(begins, tensors, strict=False)))
        return [self._gradient(piece, gradients_by_begin) for piece in pieces]

    def _gradient(
        self, piece: ParameterPiece, gradients_by_begin: Sequence[Mapping[int, Tensor]]
    ) -> Tensor:
        mapping: Any = self.parameters[piece.parameter]._hp_mapping  # type: ignore[attr-defined]
        group: int = mapping.param_group_index
        if self.accumulates:
            return gradients_by_begin[group][0].narrow(0, piece.begin, piece.numel)
        gradient = gradients_by_begin[group][piece.begin].view(-1)
        assert len(gradient) == piece.numel, "DeepSpeed cuts gradients and masters alike"
        return gradient

    def refuse(self) -> None:
        if self.accumulates:  # each rank decides by its gradients, and some have only padding
            gradients = self.zero.fp32_groups_gradients_flat
        else:
            gradients = self.gradients(self.pieces())
        for gradient in gradients:
            gradient.fill_(torch.nan)

    def refresh(self) -> None:
        self.zero.update_lp_params()


class _Partitioned(ShardedState):
    """ZeRO 3: an even cut of every parameter; those of the last ranks end in padding."""

    def __init__(self, zero: Any, parameters: Named, data: Axis) -> None:
        self.zero = zero
        self.parameters = parameters
        self.data = data

    def pieces(self) -> list[ParameterPiece]:
        pieces = []
        for name, parameter in self.parameters.items():
            group, offset, padded = self.zero.grad_position[self.zero.get_param_id(parameter)]
            start = padded * self.data.rank
            numel = min(padded, parameter.ds_numel - start)  # type: ignore[attr-defined]
            if numel > 0:
                pieces.append(
                    ParameterPiece(
                        parameter=name,
                        tensor=self.zero.fp32_partitioned_groups_flat[group],
                        begin=int(offset),
                        start=start,
                        numel=numel,
                        writes=True,
                    )
                )
        return pieces

    def gradients(self, pieces: Sequence[ParameterPiece]) -> list[Tensor]:
        padded_gradients: dict[int, Tensor] = {}
        for number, group in enumerate(self.zero.fp16_groups):
            ids = map(id, group)
            padded_gradients.update(zip(ids, self.zero.averaged_gradients[number], strict=True))
        return [
            padded_gradients[id(self.parameters[piece.parameter])]
            .view(-1)
            .narrow(0, 0, piece.numel)
            for piece in pieces
        ]

    def refuse(self) -> None:
        # Without the padding: DeepSpeed's buffer would keep NaN there.
        for gradient in self.gradients(self.pieces()):
            gradient.fill_(torch.nan)

    def refresh(self) -> None:
        self.zero.invalidate_secondary_tensor()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        persistent = self.zero.persistent_parameters
        if persistent:
            # Small parameters stay gathered on all ranks. Without `partition`, the gather would
            # keep the old values.
            for parameter in persistent:
                parameter.partition()
            persistent[0].all_gather(persistent)


class _OnHost(ShardedState):
    """offload_optimizer: DeepSpeed copies gradients to the partitions in host memory, records their
    norms, and skips the step if a norm is not finite."""

    def __init__(self, state: ShardedState, zero: Any, parameters: Named) -> None:
        self.state = state
        self.zero = zero
        self.parameters = parameters

    def pieces(self) -> list[ParameterPiece]:
        return self.state.pieces()

    def gradients(self, pieces: Sequence[ParameterPiece]) -> list[Tensor]:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the copies are asynchronous
        gradients = []
        for piece in pieces:
            assert piece.tensor.grad is not None, "DeepSpeed allocates it once"
            gradient = piece.tensor.grad.view(-1).narrow(0, piece.begin, piece.numel)
            number = self.zero.get_param_id(self.parameters[piece.parameter])
            if number not in self.zero.norm_for_param_grads:
                gradient.zero_()  # an unused parameter has the gradient of an earlier step
            gradients.append(gradient)
        return gradients

    def refuse(self) -> None:
        self.zero.local_overflow = True
        norms = self.zero.norm_for_param_grads
        norms.update({key: torch.full_like(norm, torch.nan) for key, norm in norms.items()})
        # ZeRO-2's sums on the device: DeepSpeed would keep them for the next step.
        self.zero.averaged_gradients = dict.fromkeys(self.zero.averaged_gradients)

    def refresh(self) -> None:
        self.state.refresh()
