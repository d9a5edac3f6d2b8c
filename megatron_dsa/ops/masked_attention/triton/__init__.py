"""Triton kernels for key bits and tiles of masked dense attention."""
