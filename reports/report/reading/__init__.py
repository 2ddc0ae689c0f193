"""Data of reports: one pass over a run's lines, without torch, in little memory.

metrics.jsonl ─► chunks ─┬─► totals        sums of all lines, exact
                         ├─► buckets       curves as the page draws them
                         └─► candidates    losses above those before them
"""
