"""Checkpoints: one format for every engine and layout, committed whole or not at all."""
