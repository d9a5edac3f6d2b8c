"""Results of the operations against float64: cases, references, tolerances, comparisons.

The doctor, the tests and the benchmarks check with these files:

* ``shapes``: the dims of a model's sparse layers.
* ``layouts``, ``lists``: which keys queries see, and which of them they select.
* ``sparse_attention``, ``indexer_topk``, ``engine_scores``, ``indexer_loss``: per operation its
  inputs, its float64 results (by ``ops/*/reference.py``, some tokens at a time), and the comparison
  with them.
* ``comparison``: what a comparison finds. ``tolerances``: how much may differ.
"""
