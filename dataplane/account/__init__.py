"""What a dataset is made of: what people state of it, what was left out, and samples of it."""
