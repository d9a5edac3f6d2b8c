"""Compressor in Triton."""
