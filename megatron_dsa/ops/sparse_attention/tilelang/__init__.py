"""Sparse attention in TileLang: Hopper kernels, and portable ones for other GPUs."""
