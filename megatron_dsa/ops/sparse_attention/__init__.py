"""Attention of every query to its own list of keys."""
