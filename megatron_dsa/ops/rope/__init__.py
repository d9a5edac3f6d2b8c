"""Rotary embeddings (rope) of queries and keys."""
