"""Our own kernels for Hopper (sm_90a), in TileLang: ``docs/kernels/sparse_attention.md``."""
