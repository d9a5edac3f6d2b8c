"""Our own kernel of the sparse indexer loss for Hopper (``docs/kernels/indexer.md``: figures)."""
