"""Show what rows, steps and documents of a plan hold, and prove them against a run's ledger."""
