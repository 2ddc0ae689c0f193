"""Hybrid models in plain torch: operators, blocks, counting, conversion, generation.

A model is a YAML file (`config`): widths, and a pattern of operators. `model` builds it from
`block`s: norm, operator (`operators/`), residual. Packed documents (`documents`) never see each
other. Everything here needs torch alone.
"""
