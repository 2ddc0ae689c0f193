"""Tensor and context parallelism: the axes of a layout, sharding, and communication."""
