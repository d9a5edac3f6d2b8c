"""Our own kernel of the sparse indexer loss for Hopper (``docs/indexer_kernels.md``: figures)."""
