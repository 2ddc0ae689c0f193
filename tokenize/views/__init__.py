"""Views: datasets that store no tokens, only which documents of a base dataset they have."""
