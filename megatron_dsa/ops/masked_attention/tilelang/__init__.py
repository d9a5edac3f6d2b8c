"""TileLang kernels of masked dense attention on Hopper (sm_90a)."""
