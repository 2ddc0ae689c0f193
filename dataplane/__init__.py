"""The data plane: storage, datasets, the order of rows, and the loader."""
