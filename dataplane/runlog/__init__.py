"""Log of each step of a run: metrics, and the ledger of its rows."""
