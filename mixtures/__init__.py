"""The plan: sources, weights, phases, annealing; what a run will see, and what it saw."""
