"""The order of rows as pure arithmetic: the plan, and its stream."""
