"""Cases of the calls of a model: for each op, a case with the call's widths, dtypes and options.

Rows, lengths and documents are the trial's. A case runs on one device: what ranks exchange inside
an op is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from .calls import Call
from .cases.case import Case
from .cases.convolutions import direct, modal, transform
from .cases.fp8 import fp8_gated_norm, fp8_glu, fp8_norm, fp8_rounding
from .cases.scans import selective, ssd
from .cases.tokens import gated_norm, glu, loss, norm, rope, routed_rows

MAX_REACH = 4096
"""Most taps of a free filter that a case has: a longer one reaches beyond the rows of a trial."""
MAX_IDS = 1 << 15
"""Most ids of a vocabulary; a larger one is replaced by MAX_IDS / 2 and the remainder of it, which
keeps what a program is compiled for: divisibility, and a last block that is not full."""

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def cases_of(calls: Sequence[Call]) -> list[Case]:
    """Return the cases of a model's calls, each once."""
    cases = {
        (case.kernel, case.name): case for call in calls for case in CASES_BY_OP[call.op](call)
    }
    return list(cases.values())


def _convolution(call: Call) -> Iterator[Case]:
    gated = call.options["gated"]
    width = call.width("x") // (3 if gated else 1)
    groups, reach = call.shapes["taps"]
    dtypes = call.named_dtypes(x="x", taps="taps", bias="bias", skip="skip", history="history")
    for packed in (False, True):
        case = direct(
            call.op,
            reach,
            width // groups,
            gated=gated,
            silu=call.options.get("silu", False),
            bias="bias" in call,
            skip="skip" in call,
            history="history" in call,
            packed=packed,
        )
        yield _for_call(case, call, width, dtypes)


def _transform(call: Call) -> Iterator[Case]:
    gated = call.options["gated"]
    width = call.width("x") // (3 if gated else 1)
    groups, reach = call.shapes["taps"]
    for packed in (False, True):
        case = transform(
            min(reach, MAX_REACH), width // groups, gates=gated, packed=packed, skip="skip" in call
        )
        yield _for_call(case, call, width, call.named_dtypes(x="x", taps="taps", skip="skip"))


def _modal(call: Call) -> Iterator[Case]:
    gated = call.options["gated"]
    width, modes = call.shapes["rates"]
    dtypes = call.named_dtypes(
        x="x", rates="rates", residues="residues", skip="skip", state="state"
    )
    for packed in (False, True):
        case = modal(modes, gates=gated, state="state" in call, packed=packed, skip="skip" in call)
        yield _for_call(case, call, width, dtypes)


def _ssd(call: Call) -> Iterator[Case]:
    head_dim, state_size = call.options["head_dim"], call.options["state_size"]
    heads = call.width("D")
    groups = (call.width("xBC") - heads * head_dim) // (2 * state_size)
    dtypes = call.named_dtypes(
        x="xBC", B="xBC", C="xBC", dt="dt", dt_bias="dt_bias", A_log="A_log", D="D", state="state"
    )
    for packed in (False, True):
        case = ssd(
            groups,
            heads,
            state="state" in call,
            packed=packed,
            head_dim=head_dim,
            state_size=state_size,
        )
        yield _for_call(case, call, heads * head_dim, dtypes)


def _selective(call: Call) -> Iterator[Case]:
    heads, channels, size = call.shapes["A"]
    dtypes = call.named_dtypes(
        x="x", dt="dt", bias="dt_bias", A="A", wide="B", D="D", z="z", state="state"
    )
    for packed in (False, True):
        case = selective(heads, size, state="state" in call, packed=packed)
        yield _for_call(case, call, heads * channels, dtypes)


def _norm(call: Call) -> Iterator[Case]:
    eps, outside = call.options["eps"], call.options["eps_outside"]
    residual = "residual" in call
    case = norm(outside=outside, pair=not residual, residual=residual, eps=eps)
    yield _for_call(case, call, call.width("x"), _norm_dtypes(call))


def _fp8_norm(call: Call) -> Iterator[Case]:
    eps, outside = call.options["eps"], call.options["eps_outside"]
    case = fp8_norm(outside=outside, residual="residual" in call, eps=eps)
    yield _for_call(case, call, call.width("x"), _norm_dtypes(call))


def _norm_dtypes(call: Call) -> dict[str, torch.dtype]:
    return call.named_dtypes(x="x", weight="weight", residual="residual")


def _gated_norm(call: Call) -> Iterator[Case]:
    case = gated_norm(call.options["groups"], call.options["eps"])
    dtypes = call.named_dtypes(y="y", wide="z", weight="weight")
    yield _for_call(case, call, call.width("y"), dtypes)


def _fp8_gated_norm(call: Call) -> Iterator[Case]:
    dtypes = call.named_dtypes(y="y", wide="z", weight="weight")
    yield _for_call(fp8_gated_norm(call.options["eps"]), call, call.width("y"), dtypes)


def _glu(call: Call) -> Iterator[Case]:
    case = (fp8_glu if call.op == "glu_fp8" else glu)(call.options["activation"])
    yield _for_call(case, call, call.width("x") // 2, call.named_dtypes(x="x"))


def _rope(call: Call) -> Iterator[Case]:
    heads, head_dim = call.shapes["x"][2:]
    turning = 32 * call.width("cos") / head_dim
    for packed in (False, True):
        case = rope(heads, turning, packed=packed, head_dim=head_dim)
        yield _for_call(case, call, heads * head_dim, call.named_dtypes(joint="x"))


def _routed_rows(call: Call) -> Iterator[Case]:
    rows = "rows" if "rows" in call else "x"
    case = routed_rows(call.width("row_ids"))
    yield _for_call(case, call, call.width(rows), call.named_dtypes(x=rows, rows=rows))


def _loss(call: Call) -> Iterator[Case]:
    ids, width = call.shapes["weight"]
    if ids > MAX_IDS:
        ids = MAX_IDS // 2 + ids % (MAX_IDS // 2)
    case = loss(call.options["z_loss"], weighted=True, ids=ids)
    yield _for_call(case, call, width, call.named_dtypes(hidden="hidden", weight="weight"))


def _fp8_rows(call: Call) -> Iterator[Case]:
    yield _for_call(fp8_rounding(), call, call.width("x"), call.named_dtypes(x="x", powers="x"))


def _fp8_linear(call: Call) -> Iterator[Case]:
    """The op rounds its inputs, the rows of the matrix, and the gradients of its outputs."""
    for width in sorted({call.shapes["weight"][0], call.width("x")}):
        yield _for_call(fp8_rounding(), call, width, call.named_dtypes(x="x", powers="x"))


def _no_kernel(call: Call) -> Iterator[Case]:
    """Products of experts, by torch."""
    yield from ()


def _for_call(case: Case, call: Call, width: int, dtypes: Mapping[str, torch.dtype]) -> Case:
    """Return the case at the call's width and dtypes, which its name says."""
    usual = next(iter(dtypes.values()))
    differing = [f"{name} {SHORT[dtype]}" for name, dtype in dtypes.items() if dtype != usual]
    name = ", ".join([f"{case.name}; {width:,} wide", SHORT[usual], *differing])
    return case.sized(name, width, dtypes)


CASES_BY_OP: Mapping[str, Callable[[Call], Iterator[Case]]] = {
    "short_convolution": _convolution,
    "toeplitz": _convolution,
    "fft_convolution": _transform,
    "modal": _modal,
    "ssd": _ssd,
    "selective_scan": _selective,
    "rms_norm": _norm,
    "add_rms_norm": _norm,
    "rms_norm_fp8": _fp8_norm,
    "gated_rms_norm": _gated_norm,
    "gated_rms_norm_fp8": _fp8_gated_norm,
    "glu": _glu,
    "glu_fp8": _glu,
    "rope": _rope,
    "spread_rows": _routed_rows,
    "collect_rows": _routed_rows,
    "linear_cross_entropy": _loss,
    "fp8_rows": _fp8_rows,
    "fp8_linear": _fp8_linear,
    "grouped_product": _no_kernel,
}
"""Every op of a forward pass."""
