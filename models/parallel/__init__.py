"""Tensor and context parallelism: layout axes, sharding, and communication."""
