"""Record the operations of code that runs on fake tensors, by the rows of a hardware file."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from ...models.accounting.fake.repeated import iterate_tensors, run_operation
from ...models.config.options.recompute import OPERATIONS, Results
from ...models.parallel.whole_results import CompositeResultMode, Compute
from .work import Work

SIZES = ("taps", "rates", "A")
"""Arguments of kernels whose last dimension is the number of taps or of states."""
PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_grouped_mm": (0, 1),
}
"""Matrix products, and the positions of their factors."""
FREE = ("empty", "new_empty", "as_strided", "detach", "lift", "alias", "_unsafe_view", "expand")
OUTSIDE = ("prim::", "_c10d_functional::")
"""Operations that compute nothing: questions about tensors, and messages (messages.py)."""
LOSS_PRODUCTS = 3
"""Matrix products of `linear_cross_entropy`: logits, and both gradients, in the forward pass."""


class Recorder(CompositeResultMode):
    """Collects operations in `work`, without messages."""

    def __init__(self, seq_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seq_len = seq_len
        self.work: list[Work] = []
        self.times = 1
        """Times that each of the next operations counts."""
        self.kinds = {name: kind for kind, names in OPERATIONS.items() for name in names}
        self.part_of: Results | Literal[""] = ""
        """Kind of the result of which the next operations compute a part."""

    def run_whole(self, kind: Results, compute: Compute) -> tuple[Tensor, ...]:
        self.part_of = kind
        try:
            return compute()
        finally:
            self.part_of = ""

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        result = run_operation(operation, inputs, options)
        name = operation._schema.name
        plain = name.partition("::")[2]
        if operation.is_view or name.startswith(OUTSIDE) or plain.startswith(FREE):
            return result
        before = len(self.work)
        self._record(name, operation, inputs, options, result)
        self.work += self.work[before:] * (self.times - 1)
        return result

    def _record(self, name: str, operation: Any, inputs: Any, options: Any, result: Any) -> None:
        plain = name.partition("::")[2]
        moved = sum(each.nbytes for each in iterate_tensors((inputs, options, result)))
        saved: str = self.part_of or self.kinds.get(name, "")
        if name in PRODUCTS:
            first, second = PRODUCTS[name]
            self._product(inputs[first], inputs[second], moved, saved)
        elif "attention" in plain or "_attn" in plain:
            self._attention(plain, inputs, moved, saved)
        elif name.startswith("headrace::"):
            self._kernel(plain, operation, inputs, result, moved, saved)
        else:
            self.work.append(Work("memory", "", (), 1, moved, saved))

    def _product(self, a: Tensor, b: Tensor, moved: int, saved: str) -> None:
        groups = len(b) if b.dim() == 3 else 1
        m, k = a.shape[-2:]
        if a.dim() == 2:  # tokens of all groups, one after the other
            m = m // groups
        self.work.append(Work("matmul", "", (groups, m, k, b.shape[-1]), 1, moved, saved))

    def _attention(self, name: str, inputs: Any, moved: int, saved: str) -> None:
        query, key, _, *rest = inputs[1:] if "backward" in name else inputs
        if query.dim() == 3:
            self._ranges(query, key, rest[2:] if "backward" in name else rest, moved, saved)
            return
        rows, heads, length, width = query.shape
        shape = (width, heads, length, key.shape[1])
        self.work.append(Work("attention", "", shape, rows, moved, saved))

    def _ranges(self, query: Tensor, key: Tensor, rest: Any, moved: int, saved: str) -> None:
        """Record attention of ranges of tokens, each as long as the longest. Ranges that see all
        keys are as causal rows with as many pairs."""
        ends, _, queries, keys, _, causal, *_ = rest
        length = queries if causal else round(math.sqrt(2 * queries * keys))
        shape = (query.shape[2], query.shape[1], length, key.shape[1])
        self.work.append(Work("attention", "", shape, len(ends) - 1, moved, saved))

    def _kernel(
        self, name: str, operation: Any, inputs: Any, result: Any, moved: int, saved: str
    ) -> None:
        named = dict(zip((a.name for a in operation._schema.arguments), inputs, strict=False))
        kernel = name.removesuffix("_backward")
        if kernel == "linear_cross_entropy":
            if "hidden" in named:
                (tokens, width), vocabulary = named["hidden"].shape, len(named["weight"])
                shape = (1, tokens, width, vocabulary)
                self.work.append(Work("matmul", kernel, shape, LOSS_PRODUCTS, moved))
            else:
                self.work.append(Work("memory", "", (), 1, moved))
            return
        # Of one row: gradient and result have one element for each channel and token.
        own = inputs[0] if name.endswith("_backward") else next(iterate_tensors(result))
        width = own.numel() // self.seq_len
        sizes = [named[each].shape[-1] for each in SIZES if each in named]
        size = named.get("state_size", sizes[0] if sizes else 0)
        self.work.append(Work("kernel", kernel, (size, width, self.seq_len), 1, moved, saved))
