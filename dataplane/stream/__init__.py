"""The stream for a training loop of your own, as a torch dataset."""
