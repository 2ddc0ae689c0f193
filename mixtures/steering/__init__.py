"""Decisions about the shares of a run: by hand, or by a controller."""
