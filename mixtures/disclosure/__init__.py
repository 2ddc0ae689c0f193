"""Summaries of a model's training data, for a law and for inventories of software."""
