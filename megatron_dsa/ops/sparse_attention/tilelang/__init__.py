"""Sparse attention in TileLang."""
