"""Fused kernels compared by value with their twins, on the device that will run them.

    cases/        a case for every kernel and option: random inputs, the kernel, the twin
    calls         a model's calls to kernels: ops, widths, dtypes, options
    model_cases   cases for such calls
    trials        bounds, sizes, and the verdict on a case
    plan          the cases to attest, for a model or for the full table
    worker        a process that examines cases on the device
    attest        verdicts from several workers
    record        machine, plan and verdicts
    by_hand       `headrace doctor --kernels`

Tests, benchmarks, `headrace doctor --kernels` and runs share these cases and bounds.
"""
