"""CUDA sources and tile helpers that the Hopper kernels of several operations share."""
