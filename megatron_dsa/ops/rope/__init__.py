"""Interleaved rope on the last dims of heads, with or without the query norm."""
