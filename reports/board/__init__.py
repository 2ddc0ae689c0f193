"""The live page about runs: `trainer board` serves it on this machine.

    metrics.jsonl ──► columns ──► levels (beside the run) ──► curves in a window ──► plot.js

The server reads a run's files without torch, and needs little memory for large runs.
"""
