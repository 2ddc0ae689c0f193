"""Triton programs; each file is imported when its kernel first runs."""
