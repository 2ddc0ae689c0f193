"""FSDP2's keys, and its engine for a rank that holds the whole state alone."""
