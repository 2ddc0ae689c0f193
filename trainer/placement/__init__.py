"""Weights on ranks that share them, and ranks that share batches of rows."""
