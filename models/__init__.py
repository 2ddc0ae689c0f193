"""Hybrid models in plain torch: operators, blocks, counting, conversion, generation.

A YAML file (`config`) describes a model by its widths and its pattern. `model` builds it from
`block`s: norm, operator (`operators/`), residual. Packed documents (`documents`) never see each
other. Everything here needs torch alone.
"""
