"""The losses of documents in a step's rows."""
