"""The loader: micro-batches of a rank, read ahead by workers."""
