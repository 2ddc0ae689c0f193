"""Triton programs of a model, compiled side by side before its first step, with or without a GPU.

    launches     programs that a step and its attestation launch, from fake tensors
    cache        entries of Triton's cache: which are whole, and which are not
    tools        what Triton needs to compile: an assembler, and a C compiler for its launcher
    worker       a process that lists the programs, and compiles them in forks of itself
    compile      its caller: progress, and what was compiled
    by_hand      `headrace kernels compile`

The worker never meets a device: Triton compiles for the capability that it is told.
"""
