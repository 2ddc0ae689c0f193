"""The ground: storage, shards, manifests, the order, the stream, the loader."""
