"""Input files: opening, decompressing, HTTP, and hashes of their content."""
