"""The YAML files that come with headrace: models, mixtures and runs to start from."""
