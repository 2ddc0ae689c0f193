"""What people look at: the report, the live board, rankings of mixtures, scores."""
