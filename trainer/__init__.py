"""The run: engines, parallel layouts, schedule, checkpoints, report."""
