"""A corpus: the list of its files, and its documents without bad or empty ones."""
