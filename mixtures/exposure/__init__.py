"""Find where documents were trained on: in which runs, rows, steps and checkpoints."""
