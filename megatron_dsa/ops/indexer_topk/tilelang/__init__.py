"""TileLang kernels of index scores and selection for Hopper (sm_90a)."""
