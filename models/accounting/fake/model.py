"""A model on fake tensors with a single layer per kind, whose parts run forward and backward.

On a GPU, fused kernels run where `kernel: auto` chooses them. On a CPU, rows have documents, as in
training. Sharded experts run as if no other rank had experts: each gets an equal share of the rows,
and exchange buffers are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...config.config import ModelConfig
from ...config.options.precision import Fp8Config
from ...config.options.recompute import Rule
from ...config.precision import compute_dtype
from ...documents import Aligned, Buckets, Documents, Spans
from ...kernels.choice import as_on_gpu
from ...layers.attention.ring_flash import plan_row_calls
from ...model.model import Model
from ...operators import BatchContext
from ...parallel.axes import Axes, Axis
from ...parallel.groups import fake_axis
from ...transforms.fp8 import quantize
from ..count import build_meta
from ..pieces import EMBEDDINGS, Passes
from ..shape import Shape
from .linear import linear_layers
from .trace import StorageMeter, fake_tensors, new_mode, trace

T = TypeVar("T")


class FakeDocuments(Documents):
    """Documents with real tensors as layouts, since shapes depend on the values."""

    def prepend_history(self, before: int) -> Documents:
        with _disable_current_modes():
            return FakeDocuments(super().prepend_history(before).positions)

    def buckets(self) -> Buckets:
        with _disable_current_modes():
            return super().buckets()

    def aligned(self, chunk: int, *, compiled: bool = False) -> Aligned:
        with _disable_current_modes():
            return super().aligned(chunk, compiled=compiled)

    def spans(self, *, compiled: bool = False) -> Spans:
        with _disable_current_modes():
            return super().spans(compiled=compiled)

    def get_or_build(self, key: Hashable, build: Callable[[Documents], T]) -> T:
        with _disable_current_modes():
            return super().get_or_build(key, build)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Set torch's threads inside: some operations allocate memory per thread."""
    original = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(original)


class FakeModel:
    """Model and micro-batch on fake tensors."""

    def __init__(
        self, config: ModelConfig, shape: Shape, *, packed: bool = False, named: bool = False
    ) -> None:
        """`packed` gives the rows two documents each; `named` gives the axes names, by which ops
        find them (`groups.finding`): with it, messages inside ops are sent, too."""
        degrees, self.packed = shape.degrees, packed
        self.shape, self.mode = shape, new_mode()
        self.config = _keep_local_experts(config, degrees.ep)
        axis = fake_axis if named else lambda _, rank, size: Axis(None, rank, size)
        self.axes = Axes(
            tensor=axis("tensor", degrees.tp - 1, degrees.tp),
            context=axis("context", degrees.cp - 1, degrees.cp),  # receives all earlier states
            **shape.row_forms,
        )
        self.documents = self._documents()
        self.model = self._build()

    @contextmanager
    def _fake_tensors(self) -> Iterator[None]:
        """Create fake tensors inside, for the shape's device and the engine's linear function."""
        kernels = as_on_gpu() if self.shape.device == "cuda" else nullcontext()
        with (
            kernels,
            linear_layers(self.shape.linear),
            fake_tensors(compute_dtype(self.shape.precision), self.mode),
        ):
            yield

    def _build(self) -> Model:
        with self._fake_tensors():
            model = quantize(Model(self.config), self.shape.precision.fp8)
            model.shard(self.axes)
            fp32 = model.full_precision(self.shape.precision)
            for name, parameter in model.named_parameters():
                if name in fp32:
                    parameter.data = parameter.data.float()
        return model

    def _documents(self) -> Documents | None:
        """Return documents as long as the rows, or two for each; None where a GPU needs none."""
        shape, axis = self.shape, self.axes.context
        if shape.device == "cuda" and not self.packed:
            return None
        rows, length = shape.rows, shape.seq_len
        ends = torch.arange(0, rows * length + 1, length)
        if self.packed:
            ends = torch.cat([ends, ends[:-1] + length // 3 + 1]).sort().values
        rows_documents = FakeDocuments(Documents.build(ends, (rows, length)).positions)
        if axis.size == 1:
            return rows_documents
        return FakeDocuments(rows_documents.positions[:, axis.part(length)], rows_documents)

    def run(self, trace_part: Callable[[FakeModel], Passes]) -> Passes:
        with self._fake_tensors(), _threads(self.shape.threads):
            return trace_part(self)

    def peak_bytes(self, run: Callable[[Model], object]) -> int:
        """Run a function on the model without gradients, and return its peak memory in bytes."""
        meter = StorageMeter()
        with self._fake_tensors(), _threads(self.shape.threads), torch.no_grad(), meter:
            run(self.model)
        return meter.peak

    def forward(self, watch: AbstractContextManager[object], z_loss: float = 0.0) -> None:
        """Run all layers forward, and the loss, within `watch`."""
        with self._fake_tensors(), watch:
            tokens, batch = self._tokens(), self._batch()
            batch = replace(batch, embeddings=self.model.embed(tokens, batch))
            for block in self.model.typed_blocks():
                block(self._stream(), batch, None, self.model.shared_block(block.layer))
            weights = torch.ones(tokens.shape, dtype=torch.float32)
            self.model.loss(self.model.norm(self._stream()), tokens, weights, z_loss)

    def train(
        self, watch: Callable[[], AbstractContextManager[object]], z_loss: float = 0.0
    ) -> list[str]:
        """Run each layer and the loss forward and backward within `watch`. Return what failed."""
        problems = []

        def run(part: str, forward: Callable[[], Tensor]) -> None:
            try:
                with self._fake_tensors(), watch():
                    y = forward()
                    y.backward(torch.empty_like(y))
            except Exception as error:  # a part that needs real ranks
                problems.append(f"{part}: {error!r}")

        for number, block in enumerate(self.model.typed_blocks()):
            shared = self.model.shared_block(block.layer)

            def forward(block: Any = block, shared: Any = shared) -> Tensor:
                embeddings = None if shared is None else self._stream().requires_grad_()
                batch = self._batch(embeddings)
                y: Tensor = block(self._stream().requires_grad_(), batch, None, shared)[0]
                return y

            run(f"layer {number} ({block.layer})", forward)

        def loss() -> Tensor:
            tokens = self._tokens()
            weights = torch.ones(tokens.shape, dtype=torch.float32)
            stream = self.model.norm(self._stream().requires_grad_())
            total: Tensor = self.model.loss(stream, tokens, weights, z_loss)[0]
            return total.sum()

        run("loss", loss)
        return problems

    def _batch(self, embeddings: Tensor | None = None) -> BatchContext:
        length = self.shape.seq_len // self.axes.context.size
        if self.documents is None:
            positions = torch.arange(length).unsqueeze(0)
        else:
            positions = self.documents.positions
        return BatchContext(positions, self.documents, embeddings=embeddings, axes=self.axes)

    def _stream(self) -> Tensor:
        length = self.shape.seq_len // self.axes.context.size // self.axes.tensor.size
        return torch.empty(self.shape.rows, length, self.config.width)

    def _tokens(self) -> Tensor:
        length = self.shape.seq_len // self.axes.context.size
        return torch.zeros(self.shape.rows, length, dtype=torch.int64)

    def layer(self, number: int, rule: Rule, *, hops: bool = False) -> Passes:
        block = self.model.typed_blocks()[number]
        shared = self.model.shared_block(block.layer)
        block.set_recompute(rule)
        leaves = _leaves(block)
        embeddings = None
        if shared is not None:
            embeddings = self._stream().requires_grad_()
            leaves |= {f"shared.{name}": leaf for name, leaf in _leaves(shared).items()}
            leaves[EMBEDDINGS] = embeddings
        batch = self._batch(embeddings)
        self._build_ring_tables()

        def run(u: Tensor) -> Tensor:
            result: Tensor = block(u, batch, None, shared)[0]
            return result

        passes = trace(run, self._stream, leaves, hops=hops)
        block.set_recompute("none")
        return passes

    def _build_ring_tables(self) -> None:
        """Build the ring's tables first: all calls share them, so no layer should count them."""
        tokens, axis = self._tokens(), self.axes.context
        if axis.size > 1 and self.axes.attention == "ring" and self.documents is None:
            plan_row_calls.cache_clear()  # another model's tables are fake tensors of its mode
            plan_row_calls(*tokens.shape, axis, tokens.device)

    def first(self) -> Passes:
        tokens, batch = self._tokens(), self._batch()
        model = self.model
        leaves = _leaves_under(model, ("embedding.", "positions."))
        return trace(lambda ids: model.embed(ids, batch), lambda: tokens, leaves)

    def last(self) -> Passes:
        model, targets = self.model, self._tokens()
        weights = torch.ones(targets.shape, dtype=torch.float32)
        leaves = _leaves_under(model, ("embedding.", "norm.", "head."))
        return trace(lambda u: model.loss(model.norm(u), targets, weights)[0], self._stream, leaves)


def _leaves(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def _leaves_under(model: Model, roots: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in model.named_parameters() if name.startswith(roots)}


def _keep_local_experts(config: ModelConfig, ep: int) -> ModelConfig:
    """Return the model with as many experts as a rank holds."""
    if ep == 1:
        return config
    operators = dict(config.operators)
    for name, options in operators.items():
        if options.expert_count is not None:
            operators[name] = options.keep_experts(options.expert_count // ep)
    return replace(config, operators=operators)


def fp8_matrices(config: ModelConfig, fp8: Fp8Config) -> list[int]:
    """Count FP8 matrices by layer."""
    model = quantize(build_meta(config), fp8)
    return [
        sum(getattr(module, "fp8", False) for module in block.modules())
        for block in model.typed_blocks()
    ]
