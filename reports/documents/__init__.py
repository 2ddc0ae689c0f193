"""Rank the documents of a run by their losses."""
