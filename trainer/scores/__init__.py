"""Scores of a model: tasks of lm-evaluation-harness."""
