"""Fused kernels of a run before its first step."""
