"""Plan the data of a run: sources, weights, phases, annealing; and audit it afterwards."""
