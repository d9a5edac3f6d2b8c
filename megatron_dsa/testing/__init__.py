"""Comparisons of operations with float64, for tests, doctor and benchmarks."""
