"""The order of rows as pure arithmetic: the plan, and the stream that it defines."""
