"""A build: tasks that turn a corpus into shards, and the commit of a dataset."""
