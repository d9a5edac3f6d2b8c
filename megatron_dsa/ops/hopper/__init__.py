"""Tiles, CUDA sources and compilation of all TileLang kernels."""
