"""Parameters that have gradients."""

from __future__ import annotations

from torch import nn


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return names and parameters, without the biases that routers move by themselves."""
    parameters = model.named_parameters()
    return [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
