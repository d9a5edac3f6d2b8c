"""TileLang kernels that compute index scores and select keys on Hopper (sm_90a)."""
