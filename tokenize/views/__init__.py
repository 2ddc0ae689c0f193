"""Views: datasets without tokens of their own, made of documents of another dataset."""
