"""The run: engines, parallel layouts, loop, checkpoints, report."""
