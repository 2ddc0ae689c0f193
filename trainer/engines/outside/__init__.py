"""Parameters outside the engine, replicated on all ranks."""
