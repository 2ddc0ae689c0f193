"""Fused kernels compared by value with their twins, on the device that will run them.

    cases/        a case of each kernel and option: random inputs, the call, the twin
    calls         what a model asks of the kernels: ops, widths, dtypes, options
    model_cases   the cases of such calls
    trials        bounds, shapes, and the verdict on a case
    plan          the cases of a model, or those of the table
    worker        a process that runs cases on the device
    attest        the verdicts of several workers
    record        what was attested, and the outcome
    by_hand       `headrace doctor --kernels`

Tests, the checks of benchmarks, `headrace doctor --kernels` and the start of a run have these cases
and bounds in common.
"""
