"""The loader: micro-batches of a rank, read ahead by workers."""

from .batch import Batch
from .loader import Loader

__all__ = ["Batch", "Loader"]
