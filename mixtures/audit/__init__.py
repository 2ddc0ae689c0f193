"""Audit a plan's rows, steps and documents, and prove them by a run's ledger."""
