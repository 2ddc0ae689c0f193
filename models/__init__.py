"""Hybrid models in plain torch: operators, blocks, counting, conversion, generation.

A model is a YAML (`config`): widths, and a pattern of operators. `model` builds it from `block`s,
each a norm, an operator of `operators/` and a residual. Packed documents (`documents`) never see
each other. Nothing here needs more than torch.
"""
