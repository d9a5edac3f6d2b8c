"""Results of the operations against float64, for tests, doctor and benchmarks.

``cases`` has shapes, layouts and index lists, ``comparison`` errors and tolerances; per operation a
file has its inputs, its float64 results (by the operation's reference, some tokens at a time), and
the comparison with them.
"""
