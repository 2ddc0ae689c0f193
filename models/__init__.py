"""Hybrid models: operators, blocks, counting and conversion. Needs torch alone."""
