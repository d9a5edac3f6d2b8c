"""Masked dense attention: plain MLA under one bit mask for all heads."""
