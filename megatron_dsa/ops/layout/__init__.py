"""Visible keys of each query, and sharding of tokens over ranks."""
