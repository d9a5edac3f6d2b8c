"""Helpers shared by the operations."""
