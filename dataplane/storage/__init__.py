"""Files by URL: local paths and object stores, with atomic writes and retries."""
