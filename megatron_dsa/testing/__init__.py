"""Comparisons of operations with float64, for tests, doctor and benchmarks.

``cases``: shapes, layouts, index lists. ``comparison``: errors and tolerances. One file per
operation: inputs, float64 results, comparison.
"""
