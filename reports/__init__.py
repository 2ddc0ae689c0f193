"""What people look at: the report, the live board, mixture rankings, scores."""
