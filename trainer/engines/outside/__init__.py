"""Parameters that an engine never sees: each rank holds them whole."""
