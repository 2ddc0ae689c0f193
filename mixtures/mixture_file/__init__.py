"""The mixture as YAML: its dataclasses, a tolerant reader, and the checks that need no dataset."""
