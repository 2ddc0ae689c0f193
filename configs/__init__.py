"""YAML files that ship with headrace: models, mixtures and runs to start from."""
