"""What a run will cost: layouts, times and memory, searched, simulated and measured."""
