"""Masked dense attention on Hopper (sm_90a) in TileLang."""
