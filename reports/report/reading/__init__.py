"""Read a report's data in a single pass over a run's lines, without torch, in little memory.

metrics.jsonl ─► chunks ─┬─► totals        sums of all lines, exact
                         ├─► buckets       curves as the page draws them
                         └─► candidates    losses far above the losses before
"""
