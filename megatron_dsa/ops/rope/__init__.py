"""Interleaved rope, with or without the query norm."""
