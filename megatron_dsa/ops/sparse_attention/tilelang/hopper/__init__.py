"""Our own kernels for Hopper (sm_90a), in TileLang. Measurements: ``docs/kernels.md``."""
