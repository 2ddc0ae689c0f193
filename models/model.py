"""The model: u = embedding(tokens); u = block(u) for each layer; logits = norm(u) · Wᵀ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain, repeat

import torch
from torch import Tensor, nn

from ..console.errors import ConfigError, Problem
from .block import Block, build_operator
from .config import ModelConfig
from .documents import Documents
from .embedding import Embedding, Table, Unembedding
from .initializers import Initializers
from .layers.norms import build_norm
from .layers.recompute import Recompute
from .operators import BatchContext, Operator, SharedOperator, State
from .parallel.axes import Axes
from .parallel.sharding import LocalShard, shard_parameters
from .pattern import Layer
from .weights import Weights


class Model(nn.Module):
    """A language model of any pattern.

    Parameters are uninitialised until `init_weights`, or until they are loaded, so that a model
    can be built and sharded on the meta device.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.axes = Axes()
        self.local_shards: dict[str, LocalShard] = {}
        width = config.width
        self.embedding = Table(config.vocab_size, width)
        self.positions = (
            Table(config.learned_positions, width) if config.learned_positions else None
        )
        names = dict.fromkeys(layer.shared for layer in config.layers if layer.shared)
        self.shared = nn.ModuleDict({name: build_operator(config, name) for name in names})
        self.blocks = nn.ModuleList(
            Block(config, layer, self.shared_block(layer)) for layer in config.layers
        )
        final = config.final_norm or config.norm
        self.norm = build_norm(final, width, config.norm_eps, config.kernel)
        self.head = None if config.tie_embeddings else Table(config.vocab_size, width)
        self.embed = Embedding(self.embedding, self.positions)
        self.unembed = Unembedding(self.head or self.embedding, config.kernel)

    def forward(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        states: list[list[State]] | None = None,
    ) -> Tensor:
        """Return logits [rows, length, vocabulary] of int64 tokens [rows, length].

        Without `documents`, each row is one document. `states` (from `new_states`) are read and
        updated. Under context parallelism, tokens and documents are this rank's part of the rows;
        under tensor parallelism, the logits are this rank's part of the vocabulary.
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
        """Return the input of `logits`, and the sum of auxiliary losses (MoE routers), [rows].

        `rows` (bool) is False for padding rows, which statistics over a micro-batch leave out.
        """
        batch = self.batch_context(tokens, documents, states, rows)
        u = self.embed(tokens, batch)
        if self.shared:
            batch = replace(batch, embeddings=u)
        losses = u.new_zeros(len(u), dtype=torch.float32)
        for block, block_states in zip(self.typed_blocks(), states or repeat(None), strict=False):
            u, loss = block(u, batch, block_states, self.shared_block(block.layer))
            losses = losses + loss
        for state in chain.from_iterable(states or ()):
            state.seen += tokens.shape[1]
        return self.norm(u), losses

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's part of the vocabulary."""
        return self.unembed.logits(hidden, self.axes.tensor)

    def loss(
        self, hidden: Tensor, targets: Tensor, weights: Tensor, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return Σ w·ℓ, and the same sum for each row, without gradients; this rank's share."""
        return self.unembed.loss(hidden, targets, weights, z_loss, self.axes.tensor)

    def batch_context(
        self,
        tokens: Tensor,
        documents: Documents | None,
        states: list[list[State]] | None,
        rows: Tensor | None,
    ) -> BatchContext:
        """Positions and documents of a forward pass, with the layouts that its operators need."""
        if tokens.dim() != 2 or not tokens.numel():
            what = f"are {tuple(tokens.shape)}: [rows, length] of at least 1 × 1 is needed"
            hint = "leave out empty batches and empty rows"
            raise ConfigError("the model's input", [Problem("tokens", what)], hint=hint)
        length = tokens.shape[1]
        seen = states[0][0].seen if states else self.axes.context.rank * length
        self.check_length(seen + length)
        if documents is None or not self.config.isolate_documents:
            positions = torch.arange(seen, seen + length, device=tokens.device).unsqueeze(0)
            return BatchContext(positions, rows=rows, axes=self.axes)
        if states is None:
            documents.prepare(self.packing_chunks(length, tokens.device))
        return BatchContext(documents.positions, documents, rows=rows, axes=self.axes)

    def packing_chunks(self, length: int, device: torch.device) -> list[int]:
        """Chunk sizes in whose layouts operators need packed rows of this length.

        Fused kernels need none, and building a layout waits for the GPU.
        """
        operators = [b.operator for block in self.typed_blocks() for b in block.branches()]
        plain = [operator for operator in operators if not operator.fused(device)]
        return sorted(set().union(*(operator.packing_chunks(length) for operator in plain)))

    def check_length(self, length: int) -> None:
        table = self.config.learned_positions
        if table is not None and length > table:
            what = f"the table has {table} rows, and the sequence {length} tokens"
            raise ConfigError("the model", [Problem("learned_positions", what)])

    def new_states(self, capacity: int) -> list[list[State]]:
        """Empty states for generation: one for each operator call of each block."""
        return [block.new_states(capacity) for block in self.typed_blocks()]

    def set_recompute(self, recompute: Recompute) -> None:
        """Choose what the backward pass computes again instead of keeping it in memory."""
        for block in self.typed_blocks():
            block.set_recompute(recompute)

    def shared_block(self, layer: Layer) -> SharedOperator | None:
        """The shared block that feeds the layer, or None."""
        if layer.shared is None:
            return None
        shared = self.shared[layer.shared]
        assert isinstance(shared, SharedOperator)
        return shared

    def typed_blocks(self) -> list[Block]:
        """The blocks, with their type."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def shard(self, axes: Axes) -> None:
        """Keep this rank's local shard of each parameter of a whole model."""
        self.axes = axes
        self.local_shards = shard_parameters(self, axes.tensor)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw the published initialisation; equal numbers on any device and in any layout."""
        weights = initial_weights(self.config, seed)
        for name, parameter in self.named_parameters():
            shard = self.local_shards.get(name)
            parameter.copy_(weights[name] if shard is None else shard.take(weights[name]))

    def initializers(self) -> Initializers:
        """The initial distribution of each parameter, for a model that is not sharded."""
        config = self.config
        init = Initializers(
            self,
            config.init,
            width=config.width,
            layers=len(config.layers),
            branches=config.residual_branches,
        )
        for table in (self.embedding, self.positions, self.head):
            if table is not None:
                init.embedding(table.weight)
        for shared in self.shared.values():
            assert isinstance(shared, Operator)
            shared.init_weights(init)
        for block in self.typed_blocks():
            block.init_weights(init)
        init.norm(self.norm)
        return init


def initial_weights(config: ModelConfig, seed: int) -> Weights:
    """The published initialisation: whole tensors, each drawn when it is read."""
    with torch.device("meta"):
        model = Model(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return Weights(shapes, partial(model.initializers().draw, seed=seed))
