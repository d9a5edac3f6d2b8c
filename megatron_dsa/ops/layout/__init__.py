"""Visibility of keys per query, and sharding of tokens over ranks."""
