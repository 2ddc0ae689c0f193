"""An epoch of a source: the order of its tokens, in rows of any length."""
