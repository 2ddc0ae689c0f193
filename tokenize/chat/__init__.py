"""Conversations as documents: chat templates, and the learnt parts."""
