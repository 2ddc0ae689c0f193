"""The loader: micro-batches of a rank, read ahead by workers."""

from .loader import Batch, Loader

__all__ = ["Batch", "Loader"]
