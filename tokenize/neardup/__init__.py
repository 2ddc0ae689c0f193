"""Near-duplicates of a corpus: MinHash, bands of signatures, clusters, a drop list."""
