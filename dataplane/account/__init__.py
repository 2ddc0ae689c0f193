"""The account of a dataset: stated licences and sources, documents left out, and samples."""
