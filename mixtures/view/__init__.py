"""Show a plan: summary per source and phase, table, curves, plot."""
