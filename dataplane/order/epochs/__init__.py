"""One epoch in a source: permuted chunks and rows of any length."""
