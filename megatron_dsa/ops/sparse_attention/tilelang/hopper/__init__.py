"""Hopper kernels (sm_90a) in TileLang; see ``docs/kernels/sparse_attention.md``."""
