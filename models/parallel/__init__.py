"""Operators divided among processes: the axes of a layout, and what crosses between processes."""
