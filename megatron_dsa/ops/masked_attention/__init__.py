"""Masked dense attention: plain MLA with one bit mask for all heads."""
