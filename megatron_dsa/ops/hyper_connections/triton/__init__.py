"""Triton kernels of hyper-connections."""
