"""Files with a line per step: a run's metrics, and the ledger of the rows."""
