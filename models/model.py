"""The model: embedding, the blocks of the pattern, a norm, and logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..console.errors import ConfigError, Problem
from .block import Block, Checkpointing, Where, build_operator
from .config import ModelConfig
from .documents import Documents
from .initializers import Initialiser
from .kernels.choice import chosen, wanted
from .layers.norms import build_norm
from .loss import cross_entropy, fused_loss
from .operators import Operator, SharedOperator, State
from .parallel.axes import ALONE, Axes, Axis
from .parallel.sharding import LocalShard, Shard, ShardingSpec, shard_parameters
from .parallel.tensor import gather, scatter
from .pattern import Layer
from .weights import Weights


class Embedding(nn.Module):
    """One matrix used both ways: ids come in and vectors go out, or vectors in and logits out."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, x: Tensor, axis: Axis = ALONE, project: Callable[..., Any] = F.linear) -> Any:
        """Where the axis divides the rows: vectors that are to be summed, or this process's part
        of the logits. `project` may do more with vectors and the matrix than multiply them."""
        if x.is_floating_point():
            return project(x, self.weight)
        if axis.size == 1:
            return F.embedding(x, self.weight)
        here = axis.share(self.vocab_size)
        known = (x >= here.start) & (x < here.stop)
        rows = F.embedding(torch.where(known, x - here.start, 0), self.weight)
        return rows * known.unsqueeze(-1)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        return {"weight": Shard(0)}


class Model(nn.Module):
    """A language model of any pattern.

    Parameters are uninitialised until `init_weights`, or until they are filled from elsewhere, so
    that a model can be built on the meta device, and divided there.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpointing: Checkpointing = "none"
        self.axes = Axes()
        self.local_shards: dict[str, LocalShard] = {}
        self.embedding = Embedding(config.vocab_size, config.width)
        self.positions = (
            Embedding(config.learned_positions, config.width) if config.learned_positions else None
        )
        names = dict.fromkeys(layer.shared for layer in config.layers if layer.shared)
        self.shared = nn.ModuleDict({name: build_operator(config, name) for name in names})
        self.blocks = nn.ModuleList(
            Block(config, layer, self.shared_block(layer)) for layer in config.layers
        )
        final = config.final_norm or config.norm
        self.norm = build_norm(final, config.width, config.norm_eps, config.kernel)
        self.head = None if config.tie_embeddings else Embedding(config.vocab_size, config.width)

    def forward(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        states: list[list[State]] | None = None,
    ) -> Tensor:
        """Logits [rows, length, vocabulary] for int64 tokens [rows, length].

        Without `documents`, each row is one. `states` (from `new_states`) are read and updated.
        Where `axes.context` divides the rows, tokens and documents are those of our part.
        """
        return self.logits(self.hidden(tokens, documents, states=states)[0])

    def hidden(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        states: list[list[State]] | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What `logits` takes, and the sum of the operators' auxiliary losses (MoE routers).

        `rows` (bool) says which rows are text; the others have no part in these losses.
        """
        if not self.config.isolate_documents:
            documents = None
        axis = self.axes.context
        length = tokens.shape[1]
        seen = states[0][0].seen if states else axis.rank * length
        self.check_length(seen + length)
        if documents is not None:
            positions = documents.positions
            if states is None:
                documents.prepare(self.layouts(length, tokens.device))
        else:
            positions = torch.arange(seen, seen + length, device=tokens.device).unsqueeze(0)
        tensor = self.axes.tensor
        u = self.embedding(tokens, tensor)
        if self.positions is not None:
            u = u + self.positions(positions, tensor)
        u = scatter(u, tensor)
        where = Where(positions, documents, u if self.shared else None, rows, self.axes)
        losses = u.new_zeros((), dtype=torch.float32)
        for number, (layer, block) in enumerate(zip(self.config.layers, self.blocks, strict=True)):
            own = states[number] if states else None
            shared = self.shared_block(layer)
            if self.checkpointing == "block" and torch.is_grad_enabled():
                u, loss = checkpoint(block, u, where, own, shared, use_reentrant=False)
            else:
                recompute = self.checkpointing == "operator" and torch.is_grad_enabled()
                u, loss = block(u, where, own, shared, recompute)
            losses = losses + loss
        for state in (state for own in states or () for state in own):
            state.seen += length
        return self.norm(u), losses

    def layouts(self, length: int, device: torch.device) -> list[int]:
        """The chunks in whose layouts operators want packed rows of this length. Kernels want
        none, and to make one is to wait for the GPU."""
        branches = [branch for block in self.typed_blocks() for branch in block.branches()]
        plain = (
            branch.operator
            for branch in branches
            if not wanted(getattr(branch.operator.options, "kernel", "torch"), device)
        )
        return sorted(set().union(*(operator.layouts(length) for operator in plain)))

    def check_length(self, length: int) -> None:
        table = self.config.learned_positions
        if table is not None and length > table:
            what = f"the table has {table} rows, and the sequence {length} tokens"
            raise ConfigError("the model", [Problem("learned_positions", what)])

    def logits(self, hidden: Tensor) -> Tensor:
        """Of this process's part of the vocabulary, where tensor parallelism divides it."""
        result: Tensor = (self.head or self.embedding)(gather(hidden, self.axes.tensor))
        return result

    def loss(
        self, hidden: Tensor, targets: Tensor, weights: Tensor, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Σ w·ℓ, and its parts by rows, which have no gradients; this process's share of them."""
        axis = self.axes.tensor
        options: dict[str, Any] = {
            "z_loss": z_loss,
            "axis": axis,
            "vocab_size": self.config.vocab_size,
        }
        if chosen(self.config.kernel, "linear_cross_entropy", hidden):
            project = partial(fused_loss, targets=targets, weights=weights, **options)
            head = self.head or self.embedding
            fused: tuple[Tensor, Tensor] = head(gather(hidden, axis), project=project)
            return fused
        per_row = zip(self.logits(hidden), targets, weights, strict=True)
        rows = torch.stack([cross_entropy(*row, **options)[0] for row in per_row])
        return rows.sum(), rows.detach()

    def new_states(self, capacity: int) -> list[list[State]]:
        """Empty states for generation: one for each operator of each block."""
        return [block.new_states(capacity) for block in self.typed_blocks()]

    def shared_block(self, layer: Layer) -> SharedOperator | None:
        """What feeds the layer, if something does."""
        if layer.shared is None:
            return None
        shared = self.shared[layer.shared]
        assert isinstance(shared, SharedOperator)
        return shared

    def typed_blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def shard(self, axes: Axes) -> None:
        """Keep this process's part, of what was initialised as a whole."""
        self.axes = axes
        self.local_shards = shard_parameters(self, axes.tensor)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """The published initialisation; the same numbers on any device and in any layout."""
        weights = initial_weights(self.config, seed)
        for name, parameter in self.named_parameters():
            part = self.local_shards.get(name)
            parameter.copy_(weights[name] if part is None else part.take(weights[name]))

    def laws(self) -> Initialiser:
        """By what law each parameter begins, of a model that is not divided."""
        config = self.config
        init = Initialiser(
            self,
            config.init,
            width=config.width,
            layers=len(config.layers),
            branches=config.residual_branches,
        )
        for embedding in (self.embedding, self.positions, self.head):
            if embedding is not None:
                init.embedding(embedding.weight)
        for shared in self.shared.values():
            assert isinstance(shared, Operator)
            shared.init_weights(init)
        for block in self.typed_blocks():
            block.init_weights(init)
        init.norm(self.norm)
        return init


def initial_weights(config: ModelConfig, seed: int) -> Weights:
    """The published initialisation: whole tensors, each drawn when it is asked for."""
    with torch.device("meta"):
        model = Model(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return Weights(shapes, partial(model.laws().draw, seed=seed))
