"""Datasets of tokens: manifests, verified shards, and the cache of remote shards."""
