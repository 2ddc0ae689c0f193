"""Shares that are decided while a run goes on."""
