"""Our own kernel of the sparse indexer loss for Hopper. Measurements: ``docs/kernels.md``."""
