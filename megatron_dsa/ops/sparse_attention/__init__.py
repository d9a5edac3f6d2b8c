"""Attention of every query to its list of keys."""
