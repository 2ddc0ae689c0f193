"""A corpus: its files, and its documents except bad and empty ones."""
