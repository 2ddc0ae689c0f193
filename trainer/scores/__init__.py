"""Scores of a model: tasks of lm-evaluation-harness, and recall by the length of the context."""
