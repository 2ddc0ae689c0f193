"""Cases for a model's calls, by op: the call's widths, dtypes and options.

The trial sets rows, lengths and documents. A case runs on one device, without an op's messages
between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from .calls import Call
from .cases.case import Case
from .cases.convolutions import direct_case, fft_case, modal_case
from .cases.fp8 import fp8_gated_norm_case, fp8_glu_case, fp8_norm_case, fp8_rounding_case
from .cases.scans import delta_case, selective_scan_case, ssd_case
from .cases.tokens import (
    gated_norm_case,
    glu_case,
    loss_case,
    norm_case,
    rope_case,
    routed_rows_case,
)

MAX_REACH = 4096
"""Taps: a longer free filter reaches beyond a trial's rows."""
MAX_IDS = 1 << 15
"""Token ids. A larger vocabulary becomes MAX_IDS / 2 plus its remainder by that number: programs
are compiled for divisibility and a last block that is not full."""

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def build_cases(calls: Sequence[Call]) -> list[Case]:
    """Build cases for a model's calls, without duplicates."""
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
        case = direct_case(
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
        yield _fix_sizes(case, width, dtypes)


def _fft(call: Call) -> Iterator[Case]:
    gated = call.options["gated"]
    width = call.width("x") // (3 if gated else 1)
    groups, reach = call.shapes["taps"]
    for packed in (False, True):
        case = fft_case(
            min(reach, MAX_REACH), width // groups, gates=gated, packed=packed, skip="skip" in call
        )
        yield _fix_sizes(case, width, call.named_dtypes(x="x", taps="taps", skip="skip"))


def _modal(call: Call) -> Iterator[Case]:
    gated = call.options["gated"]
    width, modes = call.shapes["rates"]
    dtypes = call.named_dtypes(
        x="x", rates="rates", residues="residues", skip="skip", state="state"
    )
    for packed in (False, True):
        case = modal_case(
            modes, gates=gated, state="state" in call, packed=packed, skip="skip" in call
        )
        yield _fix_sizes(case, width, dtypes)


def _ssd(call: Call) -> Iterator[Case]:
    head_dim, state_size = call.options["head_dim"], call.options["state_size"]
    heads = call.width("D")
    groups = (call.width("xBC") - heads * head_dim) // (2 * state_size)
    dtypes = call.named_dtypes(
        x="xBC", B="xBC", C="xBC", dt="dt", dt_bias="dt_bias", A_log="A_log", D="D", state="state"
    )
    for packed in (False, True):
        case = ssd_case(
            groups,
            heads,
            state="state" in call,
            packed=packed,
            head_dim=head_dim,
            state_size=state_size,
        )
        yield _fix_sizes(case, heads * head_dim, dtypes)


def _selective_scan(call: Call) -> Iterator[Case]:
    heads, channels, size = call.shapes["A"]
    dtypes = call.named_dtypes(
        x="x", dt="dt", bias="dt_bias", A="A", wide="B", D="D", z="z", state="state"
    )
    for packed in (False, True):
        case = selective_scan_case(heads, size, state="state" in call, packed=packed)
        yield _fix_sizes(case, heads * channels, dtypes)


def _delta(call: Call) -> Iterator[Case]:
    heads, key_dim = call.shapes["k"][2:]
    value_heads, value_dim = call.shapes["v"][2:]
    dtypes = call.named_dtypes(q="q", k="k", v="v", g="g", beta="beta", state="state")
    for packed in (False, True):
        case = delta_case(
            heads,
            value_heads,
            by_channel=call.width("g") > 1,
            state="state" in call,
            packed=packed,
            key_dim=key_dim,
            value_dim=value_dim,
            kernel="fla" if call.op == "delta_fla" else "triton",
        )
        yield _fix_sizes(case, value_heads * value_dim, dtypes)


def _norm(call: Call) -> Iterator[Case]:
    eps, outside = call.options["eps"], call.options["eps_outside"]
    residual = "residual" in call
    case = norm_case(outside=outside, pair=not residual, residual=residual, eps=eps)
    yield _fix_sizes(case, call.width("x"), _norm_dtypes(call))


def _fp8_norm(call: Call) -> Iterator[Case]:
    eps, outside = call.options["eps"], call.options["eps_outside"]
    case = fp8_norm_case(outside=outside, residual="residual" in call, eps=eps)
    yield _fix_sizes(case, call.width("x"), _norm_dtypes(call))


def _norm_dtypes(call: Call) -> dict[str, torch.dtype]:
    return call.named_dtypes(x="x", weight="weight", residual="residual")


def _gated_norm(call: Call) -> Iterator[Case]:
    case = gated_norm_case(call.options["groups"], call.options["eps"])
    dtypes = call.named_dtypes(y="y", wide="z", weight="weight")
    yield _fix_sizes(case, call.width("y"), dtypes)


def _fp8_gated_norm(call: Call) -> Iterator[Case]:
    dtypes = call.named_dtypes(y="y", wide="z", weight="weight")
    yield _fix_sizes(fp8_gated_norm_case(call.options["eps"]), call.width("y"), dtypes)


def _glu(call: Call) -> Iterator[Case]:
    if call.op == "glu_fp8":
        case = fp8_glu_case(call.options["activation"])
    else:
        case = glu_case(**call.options)
    yield _fix_sizes(case, call.width("x") // 2, call.named_dtypes(x="x"))


def _rope(call: Call) -> Iterator[Case]:
    heads, head_dim = call.shapes["x"][2:]
    turning = 32 * call.width("cos") / head_dim
    for packed in (False, True):
        case = rope_case(heads, turning, packed=packed, head_dim=head_dim)
        yield _fix_sizes(case, heads * head_dim, call.named_dtypes(joint="x"))


def _routed_rows(call: Call) -> Iterator[Case]:
    rows = "rows" if "rows" in call else "x"
    case = routed_rows_case(call.width("row_ids"))
    yield _fix_sizes(case, call.width(rows), call.named_dtypes(x=rows, rows=rows))


def _loss(call: Call) -> Iterator[Case]:
    ids, width = call.shapes["weight"]
    if ids > MAX_IDS:
        ids = MAX_IDS // 2 + ids % (MAX_IDS // 2)
    case = loss_case(call.options["z_loss"], weighted=True, ids=ids)
    yield _fix_sizes(case, width, call.named_dtypes(hidden="hidden", weight="weight"))


def _fp8_rows(call: Call) -> Iterator[Case]:
    yield _fix_sizes(fp8_rounding_case(), call.width("x"), call.named_dtypes(x="x", powers="x"))


def _fp8_linear(call: Call) -> Iterator[Case]:
    """The op rounds inputs, the matrix's rows, and output gradients."""
    for width in sorted({call.shapes["weight"][0], call.width("x")}):
        yield _fix_sizes(fp8_rounding_case(), width, call.named_dtypes(x="x", powers="x"))


def _no_kernel(call: Call) -> Iterator[Case]:
    """Expert products are torch's."""
    yield from ()


def _fix_sizes(case: Case, width: int, dtypes: Mapping[str, torch.dtype]) -> Case:
    """Fix width and dtypes, and add them to the case's name."""
    first_dtype = next(iter(dtypes.values()))
    exceptions = [
        f"{argument} {DTYPE_NAMES[dtype]}"
        for argument, dtype in dtypes.items()
        if dtype != first_dtype
    ]
    name = ", ".join([f"{case.name}; {width:,} wide", DTYPE_NAMES[first_dtype], *exceptions])
    return case.fix_sizes(name, width, dtypes)


CASES_BY_OP: Mapping[str, Callable[[Call], Iterator[Case]]] = {
    "short_convolution": _convolution,
    "toeplitz": _convolution,
    "fft_convolution": _fft,
    "modal": _modal,
    "ssd": _ssd,
    "selective_scan": _selective_scan,
    "delta": _delta,
    "delta_fla": _delta,
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
    "grouped_bias": _no_kernel,
}
"""Every forward op."""
