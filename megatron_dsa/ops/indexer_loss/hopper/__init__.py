"""Our own kernel of the sparse indexer loss for Hopper. Measurements: ``docs/indexer_kernels.md``."""
