"""Causal attention to all visible keys."""
