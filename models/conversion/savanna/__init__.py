"""Savanna's configurations (Evo 2): a model, a mixture and a run from its YAML files."""
