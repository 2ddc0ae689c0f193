"""The live page of runs: `trainer board` serves it on this machine.

    metrics.jsonl ──► columns ──► levels (beside the run) ──► curves of a window ──► plot.js

The server imports no torch: it reads a run's files, and stays small beside large runs.
"""
