"""Recording of operations on fake tensors, as work that the rows in a hardware file price."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from ...models.accounting.fake.repeated import iterate_tensors, run_operation
from ...models.config.options.recompute import OPERATIONS, Results
from ...models.parallel.whole_results import CompositeResultMode, Compute
from .work import EXPERTS, Work

SIZE_ARGUMENTS = ("taps", "rates", "A", "q")
"""Kernel arguments whose last dimension is the number of taps, of states or of key channels."""
PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_grouped_mm": (0, 1),
}
"""Matrix products, and the positions of the factors among the inputs."""
GROUPED_PRODUCTS = ("headrace::grouped_product", "headrace::grouped_outer")
"""Products of experts, forward and for the weights' gradients: the operations of layers/grouped.py.
The first dimension of their first input is the rows of all experts, sorted by expert."""
FREE = ("empty", "new_empty", "as_strided", "detach", "lift", "alias", "_unsafe_view", "expand")
UNPRICED = ("prim::", "_c10d_functional::")
"""Namespaces without computation: questions about tensors, and messages (messages.py)."""
LOSS_PRODUCTS = 3
"""Matrix products in `linear_cross_entropy`: logits, and both gradients, in the forward pass."""


class OperationRecorder(CompositeResultMode):
    """Collects operations in `work`, without messages."""

    def __init__(self, seq_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seq_len = seq_len
        self.work: list[Work] = []
        self.repeats = 1
        """How often the next operations count."""
        self.saved_kinds = {name: kind for kind, names in OPERATIONS.items() for name in names}
        self.saved_kind: Results | Literal[""] = ""
        """Kind of the composite result that the next operations compute a part of."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles a trace, and torch would wrap each of its calls

    def run_composite(self, kind: Results, compute: Compute) -> tuple[Tensor, ...]:
        self.saved_kind = kind
        try:
            return compute()
        finally:
            self.saved_kind = ""

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        result = run_operation(operation, inputs, options)
        name = operation._schema.name
        base_name = name.partition("::")[2]
        if operation.is_view or name.startswith(UNPRICED) or base_name.startswith(FREE):
            return result
        start = len(self.work)
        self._record(name, operation, inputs, options, result)
        self.work += self.work[start:] * (self.repeats - 1)
        return result

    def _record(self, name: str, operation: Any, inputs: Any, options: Any, result: Any) -> None:
        base_name = name.partition("::")[2]
        traffic = sum(tensor.nbytes for tensor in iterate_tensors((inputs, options, result)))
        saved: str = self.saved_kind or self.saved_kinds.get(name, "")
        if name in PRODUCTS:
            first, second = PRODUCTS[name]
            self._record_product(inputs[first], inputs[second], traffic, saved)
        elif name in GROUPED_PRODUCTS:
            self._record_experts(inputs, result, traffic, saved)
        elif "attention" in base_name or "_attn" in base_name:
            self._record_attention(base_name, inputs, traffic, saved)
        elif name.startswith("headrace::"):
            self._record_kernel(base_name, operation, inputs, result, traffic, saved)
        else:
            self.work.append(Work("memory", "", (), 1, traffic, saved))

    def _record_product(self, a: Tensor, b: Tensor, traffic: int, saved: str) -> None:
        groups = len(b) if b.dim() == 3 else 1
        m, k = a.shape[-2:]
        if a.dim() == 2:  # the groups' tokens follow one another
            m = m // groups
        self.work.append(Work("matmul", "", (groups, m, k, b.shape[-1]), 1, traffic, saved))

    def _record_experts(self, inputs: Any, result: Tensor, traffic: int, saved: str) -> None:
        first, second, ends = inputs
        columns = result.shape[1] if result.dim() == 2 else second.shape[1]
        shape = (len(ends), max(1, round(len(first) / len(ends))), first.shape[1], columns)
        self.work.append(Work("matmul", EXPERTS, shape, 1, traffic, saved))

    def _record_attention(self, name: str, inputs: Any, traffic: int, saved: str) -> None:
        query, key, _, *options = inputs[1:] if "backward" in name else inputs
        if query.dim() == 3:
            options = options[2:] if "backward" in name else options
            self._record_ranges(query, key, options, traffic, saved)
            return
        rows, heads, length, width = query.shape
        shape = (width, heads, length, key.shape[1])
        self.work.append(Work("attention", "", shape, rows, traffic, saved))

    def _record_ranges(
        self, query: Tensor, key: Tensor, options: Any, traffic: int, saved: str
    ) -> None:
        """Record attention over token ranges, each as long as the longest. Ranges that see all keys
        count as causal rows with as many query-key pairs."""
        ends, _, num_queries, num_keys, _, causal, *_ = options
        length = num_queries if causal else round(math.sqrt(2 * num_queries * num_keys))
        shape = (query.shape[2], query.shape[1], length, key.shape[1])
        self.work.append(Work("attention", "", shape, len(ends) - 1, traffic, saved))

    def _record_kernel(
        self, name: str, operation: Any, inputs: Any, result: Any, traffic: int, saved: str
    ) -> None:
        schema_names = (argument.name for argument in operation._schema.arguments)
        arguments = dict(zip(schema_names, inputs, strict=False))
        kernel = name.removesuffix("_backward")
        if kernel == "linear_cross_entropy":
            if "hidden" in arguments:
                (tokens, width), vocabulary = arguments["hidden"].shape, len(arguments["weight"])
                shape = (1, tokens, width, vocabulary)
                self.work.append(Work("matmul", kernel, shape, LOSS_PRODUCTS, traffic))
            else:
                self.work.append(Work("memory", "", (), 1, traffic))
            return
        # Gradient and result have one element per channel and token of the one row.
        output = inputs[0] if name.endswith("_backward") else next(iterate_tensors(result))
        width = output.numel() // self.seq_len
        sizes = [arguments[key].shape[-1] for key in SIZE_ARGUMENTS if key in arguments]
        size = arguments.get("state_size", sizes[0] if sizes else 0)
        self.work.append(Work("kernel", kernel, (size, width, self.seq_len), 1, traffic, saved))
