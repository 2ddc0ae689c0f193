"""Prove which rows of a run held a document, to somebody without its shards."""
