"""The live page of runs: `trainer board` serves it on this machine.

    metrics.jsonl ──► columns ──► levels (beside the run) ──► curves of a window ──► plot.js

The server reads a run's files without torch, and needs little memory for large runs.
"""
