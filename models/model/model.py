"""The model: u = embedding(tokens); u = block(u) for each layer; logits = norm(u) · Wᵀ.

Under pipeline parallelism the layers are cut into chunks, and a rank keeps its stage's:

    chunk 0   tokens → embedding → layers → u          chunk 1   u → layers → norm → loss

What a stage does not use is absent; everything else keeps the name that it has in the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, repeat

import torch
from torch import Tensor, nn

from ...console.errors import ConfigError, ConfigProblem
from ..config.config import ModelConfig, chunk_layers, chunk_users
from ..config.options.precision import Precision
from ..config.options.recompute import Recompute, expand_rules
from ..config.pattern import Layer
from ..config.precision import compute_dtype
from ..documents import Documents
from ..layers.initializers import Initializers
from ..layers.norms import build_norm
from ..operators import BatchContext, Operator, SharedOperator, State
from ..parallel.axes import Axes
from ..parallel.local_shard import LocalShard
from ..parallel.sharding import shard_parameters, slice_local_shard
from ..weights import Weights
from .block import Block, build_operator
from .embedding import Embedding, EmbeddingTable, Unembedding
from .layer_watch import LayerWatch
from .load_balance import build_load_balance
from .loss import LossParts


class Model(nn.Module):
    """A language model.

    Parameters are uninitialised until `init_weights`, or until they are loaded, so that a model
    can be built and sharded on the meta device.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.axes = Axes()
        self.chunks = chunk_layers(len(config.layers))
        """Layers by chunk, including other stages' chunks."""
        self.compiled = False
        """True if torch.compile compiles the blocks."""
        self.local_shards: dict[str, LocalShard] = {}
        self.received: list[int] = []
        """Rows that this rank's experts received in the last chunk that ran, by operator call."""
        self.watch: LayerWatch | None = None
        """Collects per-layer signals in forward passes."""
        self.balance = build_load_balance(config)
        """Counts the experts' tokens in forward passes in training; None where nothing needs it."""
        width = config.width
        self.embedding = EmbeddingTable(config.vocab_size, width)
        self.positions = (
            EmbeddingTable(config.learned_positions, width) if config.learned_positions else None
        )
        names = dict.fromkeys(layer.shared for layer in config.layers if layer.shared)
        self.shared = nn.ModuleDict({name: build_operator(config, name) for name in names})
        self.blocks = nn.ModuleDict(
            {
                str(index): Block(config, layer, self.shared_block(layer))
                for index, layer in enumerate(config.layers)
            }
        )
        final_norm = config.final_norm or config.norm
        self.norm = build_norm(final_norm, width, config.norm_eps, config.kernel)
        self.head = None if config.tie_embeddings else EmbeddingTable(config.vocab_size, width)
        self.embed = Embedding(self.embedding, self.positions, config.embedding_multiplier)
        self.unembed = Unembedding(
            self.head or self.embedding, config.kernel, config.logits_multiplier
        )

    def forward(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        states: list[list[State]] | None = None,
    ) -> Tensor:
        """Compute logits [rows, length, vocab_size] from int64 tokens [rows, length].

        Without `documents`, a row is a single document. `states` (from `new_states`) are read and
        updated. Under context parallelism, tokens and documents are this rank's slice of the rows;
        under tensor parallelism, the logits are this rank's vocabulary shard.
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
        """Return the input to `logits` [rows, length, width], and the summed auxiliary losses (MoE
        routers) [rows].

        `rows` (bool) is False for padding rows, which statistics over a micro-batch leave out.
        """
        assert len(self.chunks) == 1, "the model is whole"
        (hidden,), losses = self.run_chunk(0, tokens, documents, states=states, rows=rows)
        for state in chain.from_iterable(states or ()):
            state.seen += tokens.shape[1]
        return hidden, losses

    def run_chunk(
        self,
        chunk: int,
        tokens: Tensor,
        documents: Documents | None = None,
        stream: Sequence[Tensor] = (),
        *,
        states: list[list[State]] | None = None,
        rows: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the stream that the next chunk takes, and the summed auxiliary losses [rows].

        The stream is (u,), or (u, embeddings) while a later layer calls a shared block, both
        [rows, length, width]; after the last chunk it is the input to `logits`. The first chunk
        takes none.
        """
        layers = self.chunks[chunk]
        batch = self.batch_context(tokens, documents, states, rows)
        if chunk == 0:
            u = embeddings = self.embed(tokens, batch)
        else:
            u, embeddings = stream[0], stream[-1]
        if self.calls_shared(layers.start):
            batch = replace(batch, embeddings=embeddings)
        losses = u.new_zeros(len(u), dtype=torch.float32)
        balance = self.balance if self.training and torch.is_grad_enabled() else None
        counts_routed = self.watch is not None or balance is not None
        self.received = []
        for layer_index, block, block_states in zip(
            layers, self.layer_blocks(layers), states or repeat(None), strict=False
        ):
            layer_batch = batch.layer_context(counts_routed=counts_routed)
            u, loss = block(u, layer_batch, block_states, self.shared_block(block.layer))
            if loss is not None:
                losses = losses + loss
            self.received += layer_batch.received
            if balance is not None:
                balance.add(layer_index, layer_batch.routed or ())
            if self.watch is not None:
                self.watch.add(layer_index, u, rows, layer_batch.routed or ())
        if chunk == len(self.chunks) - 1:
            return (self.norm(u),), losses
        # FSDP2 hands a module views of its inputs, and refuses to let it return them.
        return ((u, embeddings.clone()) if self.calls_shared(layers.stop) else (u,)), losses

    def stream_tensors(self, chunk: int) -> int:
        """Count the tensors in a chunk's input stream."""
        return 1 + self.calls_shared(self.chunks[chunk].start)

    def calls_shared(self, first_layer: int) -> bool:
        """Return True if a layer from `first_layer` on calls a shared block."""
        return any(layer.shared is not None for layer in self.config.layers[first_layer:])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, length, vocab_size / tp], this rank's vocabulary shard."""
        return self.unembed.logits(hidden, self.axes.tensor)

    def loss(
        self, hidden: Tensor, targets: Tensor, weights: Tensor, z_loss: float = 0.0
    ) -> tuple[Tensor, LossParts]:
        """Return Σ w·ℓ; and, without gradients, its parts; both are this rank's share. hidden
        [rows, length, width], targets and weights [rows, length]."""
        return self.unembed.loss(hidden, targets, weights, z_loss, self.axes.tensor)

    def batch_context(
        self,
        tokens: Tensor,
        documents: Documents | None,
        states: list[list[State]] | None,
        rows: Tensor | None,
    ) -> BatchContext:
        """Return a forward pass's positions and documents, with its operators' layouts."""
        if tokens.dim() != 2 or not tokens.numel():
            message = f"are {tuple(tokens.shape)}: [rows, length] of at least 1 × 1 is needed"
            hint = "leave out empty batches and empty rows"
            raise ConfigError("the model's input", [ConfigProblem("tokens", message)], hint=hint)
        length = tokens.shape[1]
        seen = states[0][0].seen if states else self.axes.context.rank * length
        self.check_length(seen + length)
        if documents is None or not self.config.isolate_documents:
            positions = torch.arange(seen, seen + length, device=tokens.device).unsqueeze(0)
            return BatchContext(positions, rows=rows, axes=self.axes)
        if states is None:
            spanned = any(options.reads_spans for options in self.config.operators.values())
            documents.prepare(
                self.packing_chunks(length, tokens.device),
                spans=spanned and tokens.device.type == "cuda",
                compiled=self.compiled,
            )
        return BatchContext(documents.positions, documents, rows=rows, axes=self.axes)

    def packing_chunks(self, length: int, device: torch.device) -> list[int]:
        """Return the chunk sizes to which operators align packed rows with this length.

        Fused kernels need none, and building a layout waits for the GPU.
        """
        operators = [operator for block in self.typed_blocks() for operator in block.operators()]
        unfused = [operator for operator in operators if not operator.fused(device)]
        return sorted(set().union(*(operator.packing_chunks(length) for operator in unfused)))

    def check_length(self, length: int) -> None:
        table = self.config.learned_positions
        if table is not None and length > table:
            message = f"the table has {table} rows, and the sequence {length} tokens"
            raise ConfigError("the model", [ConfigProblem("learned_positions", message)])

    def new_states(self, capacity: int) -> list[list[State]]:
        """Create empty states for generation, by block and operator call."""
        return [block.new_states(capacity) for block in self.typed_blocks()]

    def set_recompute(self, recompute: Recompute) -> None:
        """Choose what the backward pass recomputes."""
        rules = expand_rules(recompute, len(self.config.layers))
        for index, block in self.blocks.items():
            assert isinstance(block, Block)
            block.set_recompute(rules[int(index)])

    def shared_block(self, layer: Layer) -> SharedOperator | None:
        """Return the shared block that feeds the layer, or None."""
        if layer.shared is None:
            return None
        shared = self.shared[layer.shared]
        assert isinstance(shared, SharedOperator)
        return shared

    def typed_blocks(self) -> list[Block]:
        """Return this stage's blocks, typed."""
        return [block for block in self.blocks.values() if isinstance(block, Block)]

    def layer_blocks(self, layers: range) -> list[Block]:
        """Return these layers' blocks."""
        blocks = (self.blocks[str(index)] for index in layers)
        return [block for block in blocks if isinstance(block, Block)]

    def keep(self, cuts: Sequence[int], kept_chunks: Collection[int]) -> None:
        """Cut the layers into chunks, and delete the modules that `kept_chunks` do not use.

        `cuts` are the layers at which later chunks begin.
        """
        self.chunks = chunk_layers(len(self.config.layers), cuts)
        for chunk, layers in enumerate(self.chunks):
            for index in layers if chunk not in kept_chunks else ():
                del self.blocks[str(index)]
        for path, chunks in chunk_users(self.config, self.chunks).items():
            if chunks.isdisjoint(kept_chunks):
                parent, _, name = path.rpartition(".")
                delattr(self.get_submodule(parent), name)
        if 0 not in kept_chunks:
            del self.embed
        if len(self.chunks) - 1 not in kept_chunks:
            del self.unembed

    def full_precision(self, precision: Precision) -> set[str]:
        """Return the names of parameters that stay fp32 beside half-precision ones."""
        if not precision.separate_masters:
            return set()
        return {
            f"{path}.{name}"
            for path, operator in self.named_modules()
            if isinstance(operator, Operator)
            for name in operator.full_precision
            if getattr(operator, name) is not None
        }

    def cast(self, precision: Precision) -> None:
        """Give each parameter the number format in which it computes."""
        fp32 = self.full_precision(precision)
        for name, parameter in self.named_parameters():
            if name not in fp32:
                parameter.data = parameter.data.to(compute_dtype(precision))

    def shard(self, axes: Axes) -> None:
        """Keep this rank's local shard of every parameter; modules must be unsharded."""
        self.axes = axes
        self.local_shards = shard_parameters(self, axes)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw the published initialisation; equal numbers on any device and in any layout."""
        weights = initial_weights(self.config, seed)
        for name, parameter in self.named_parameters():
            shard = self.local_shards.get(name)
            parameter.copy_(
                weights[name] if shard is None else slice_local_shard(shard, weights[name])
            )

    def initializers(self) -> Initializers:
        """Return the parameters' initial distributions, for an unsharded model."""
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
    """Return the published initialisation: whole tensors, drawn when they are read."""
    with torch.device("meta"):
        model = Model(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return Weights(shapes, partial(model.initializers().draw, seed=seed))
