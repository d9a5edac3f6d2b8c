"""Tiles, CUDA sources and compilation of the TileLang kernels of all operations."""
