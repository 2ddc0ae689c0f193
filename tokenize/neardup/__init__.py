"""Near-duplicates in a corpus: MinHash signatures, bands, clusters, a drop list."""
