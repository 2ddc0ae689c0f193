"""Files with one line per step of a run: metrics, and the ledger of its rows."""
