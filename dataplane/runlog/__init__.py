"""What a run logs of each step: metrics and the ledger of its rows."""
