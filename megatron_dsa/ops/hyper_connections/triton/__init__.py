"""Hyper-connections in Triton."""
