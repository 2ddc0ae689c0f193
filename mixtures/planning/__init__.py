"""Resolve a mixture against dataset manifests, or against the run it continues, into a plan."""
