"""The Triton programs: each file is imported when its kernel is first run."""
