"""Conversations as documents: chat templates, and the parts of a conversation that are learnt."""
