"""Orders for any shares: fair within the rows of one length, with debts from one to the next."""
